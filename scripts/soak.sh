#!/usr/bin/env bash
# Injects random faults into a small run on CPUs for about an hour: kills, kills during saves,
# flipped bits, SIGTERM and pauses. Exits with 0 if the result equals an uninterrupted run bit for
# bit. STEPS sets the length; other arguments go to tests/faults/kills.py.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python -m tests.faults.kills --steps "${STEPS:-10000}" --save-every 50 --eval-every 500 \
    --patience 86400 --faults kill=40 kill-in-save=20 flip=10 term=15 pause=15 "$@"
