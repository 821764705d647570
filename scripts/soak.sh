#!/usr/bin/env bash
# About an hour of random faults on a small run, on CPUs: kills, kills inside saves, flipped bits, SIGTERM, pauses. Ends with
# exit code 0 if the run is, bit for bit, the one that nothing interrupted; says how the memory of a long process grew.
# More or fewer with STEPS, or with arguments of tests/faults/kills.py after it.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python -m tests.faults.kills --steps "${STEPS:-10000}" --save-every 50 --eval-every 500 --patience 86400 \
    --faults kill=40 kill-in-save=20 flip=10 term=15 pause=15 "$@"
