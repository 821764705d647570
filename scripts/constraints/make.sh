#!/usr/bin/env bash
# Writes scripts/constraints/pythonX.Y.txt for each given Python: the versions that pip would
# install today for '.[test,plan]'. It installs nothing. CI uses these files; update them after
# all tests have passed with newer versions.
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

report = json.loads(pathlib.Path(sys.argv[1]).read_text())
lines = set()
for package in (entry["metadata"] for entry in report["install"]):
    name = re.sub("[-_.]+", "-", package["name"]).lower()
    # torch's CPU build is 2.13.0+cpu on its own index; 2.13.0 matches it too
    version = package["version"].split("+")[0]
    if name != "jaxsp":
        lines.add(f"{name}=={version}")
path = pathlib.Path("scripts/constraints/python%d.%d.txt" % sys.version_info[:2])
path.write_text("\n".join(sorted(lines)) + "\n")
print(f"{path}: {len(lines)} packages")
PYTHON
done
