#!/usr/bin/env bash
# Format, lint, types, tests; stops at the first that fails. `--fix` formats and repairs first; `--no-tests` leaves the tests out,
# `--all` runs the slow ones too, which CI does not: an hour and more on 2 cores.
set -euo pipefail
cd "$(dirname "$0")/.."

run() {
    echo "+ $*"
    "$@"
}

tests=(-m "not slow")
for word in "$@"; do
    case $word in
        --fix)
            run python -m ruff check --fix-only --quiet .
            run python -m ruff format .
            ;;
        --no-tests) tests=() ;;
        --all) tests=(-m "slow or not slow") ;;
        *)
            echo "$word: unknown. Use --fix, --no-tests or --all." >&2
            exit 2
            ;;
    esac
done

run python -m ruff format --check .
run python -m ruff check .
run python -m mypy
[ ${#tests[@]} = 0 ] || run python -m pytest -n 2 --dist loadfile "${tests[@]}"
