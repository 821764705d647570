#!/usr/bin/env bash
# Format, lint, types, tests; stops at the first that fails. `--fix` formats and repairs first; `--no-tests` leaves the tests out.
set -euo pipefail
cd "$(dirname "$0")/.."

run() {
    echo "+ $*"
    "$@"
}

tests=yes
for word in "$@"; do
    case $word in
        --fix)
            run python -m ruff check --fix-only --quiet .
            run python -m ruff format .
            ;;
        --no-tests) tests=no ;;
        *)
            echo "$word: unknown. Use --fix or --no-tests." >&2
            exit 2
            ;;
    esac
done

run python -m ruff format --check .
run python -m ruff check .
run python -m mypy
[ $tests = no ] || run python -m pytest
