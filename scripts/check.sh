#!/usr/bin/env bash
# Checks format, lint and types, and runs the default and e2e tests. Stops at the first failure.
# `--fix` formats and repairs first, `--no-tests` skips the tests, and `--all` adds the slow tests
# (about an hour and a half on 2 cores).
#
# `--releases` checks each supported release of JAX in a fresh environment instead
# (scripts/check_release.py). It needs Python 3.11 and 3.12, a package index, and about 4 GB in the
# temporary folder.
set -euo pipefail
cd "$(dirname "$0")/.."

run() {
    echo "+ $*"
    "$@"
}

# Checks release $2 of JAX on Python $1 in a fresh environment. Other versions are those of CI.
check_release() {
    local python constraints="scripts/constraints/python$1.txt"
    if ! python=$(find_python "$1"); then
        echo "jax $2: skipped, because Python $1 is not installed"
        return
    fi
    checked=$((checked + 1))
    rm -rf "$folder/environment"
    sed -E "s/^(jax|jaxlib|jax-cuda12-(pjrt|plugin))==.*/\1==$2/" "$constraints" \
        > "$folder/constraints.txt"
    if ! "$python" -m venv "$folder/environment" ||
        ! "$folder/environment/bin/pip" install --quiet -e '.[plan]' \
            -c "$folder/constraints.txt"; then
        echo "jax $2: FAILED: it could not be installed on Python $1"
        return 1
    fi
    TF_CPP_MIN_LOG_LEVEL=3 "$folder/environment/bin/python" -m scripts.check_release "$2"
}

check_releases() {
    local version release failed=0 checked=0
    source scripts/find_python.sh
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    # the XLA of 0.11.2 differs from that of the releases before and after it
    check_release 3.12 0.11.2 || failed=1
    for version in 3.11 3.12; do
        release=$(sed -n 's/^jax==//p' "scripts/constraints/python$version.txt")
        check_release $version "$release" || failed=1
    done
    if [ $checked -lt 3 ]; then
        echo "$checked of 3 releases checked: install Python 3.11 and 3.12" >&2
        return 1
    fi
    return $failed
}

tests=(-m "not slow and not gpu")
for word in "$@"; do
    case $word in
        --fix)
            run python -m ruff check --fix-only --quiet .
            run python -m ruff format .
            ;;
        --no-tests) tests=() ;;
        --releases)
            check_releases
            exit
            ;;
        --all) tests=(-m "slow or not slow") ;;  # gpu tests skip without a GPU
        *)
            echo "$word: unknown. Use --fix, --no-tests, --all or --releases." >&2
            exit 2
            ;;
    esac
done

run python -m ruff format --check .
run python -m ruff check .
run python -m mypy
[ ${#tests[@]} = 0 ] || run python -m pytest "${tests[@]}"
