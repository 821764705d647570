#!/usr/bin/env bash
# Writes scripts/constraints/pythonX.Y.txt for each Python named: the versions that pip would install today for '.[test,plan]'.
# Nothing is installed. CI installs from these files; after a run of all tests with newer versions, make them again.
#
#   scripts/constraints/make.sh python3.11 python3.12
set -euo pipefail
cd "$(dirname "$0")/../.."

[ $# -gt 0 ] || { echo "usage: scripts/constraints/make.sh PYTHON ..." >&2; exit 2; }
report=$(mktemp)
trap 'rm -f "$report"' EXIT

for python in "$@"; do
    "$python" -m pip install --quiet --dry-run --ignore-installed --report "$report" '.[test,plan]'
    "$python" - "$report" <<'PYTHON'
import json, pathlib, re, sys

found = [one["metadata"] for one in json.loads(pathlib.Path(sys.argv[1]).read_text())["install"]]
# torch's build for CPUs is called 2.13.0+cpu where it is, and 2.13.0 stands for it
lines = {f"{re.sub('[-_.]+', '-', one['name']).lower()}=={one['version'].split('+')[0]}" for one in found if one["name"] != "jaxsp"}
path = pathlib.Path("scripts/constraints/python%d.%d.txt" % sys.version_info[:2])
path.write_text("\n".join(sorted(lines)) + "\n")
print(f"{path}: {len(lines)} packages")
PYTHON
done
