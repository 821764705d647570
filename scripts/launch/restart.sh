#!/usr/bin/env bash
# Runs a command, and again after a hang or the loss of a process, at most 20 times:
#
#   scripts/launch/restart.sh jaxsp train CONFIG.yaml
#
# Exit codes: 75 the run hung; 134 SIGABRT, with which JAX ends a process when another one is lost;
# 137 a process was killed. The run continues from its latest checkpoint.
set -uo pipefail

trap 'stopped=yes; kill -TERM "$child"' TERM
stopped=
for restarts_left in {20..0}; do
    "$@" &
    child=$!
    wait "$child"
    code=$?
    while kill -0 "$child" 2> /dev/null; do # the trap ended the wait
        wait "$child"
        code=$?
    done
    case $stopped$code in
        75 | 134 | 137) echo "$0: exit code $code, $restarts_left restarts left" >&2 ;;
        *) break ;;
    esac
done
exit $code
