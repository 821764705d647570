#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: prints what is there, runs tests/gpu, times the training step, keeps the numbers in
# scripts/bench/results/ and adds a line to scripts/bench/LOG.md. All parts run; exit code 1 if one failed. Without a GPU: one
# line, and exit code 2. Planned for less than 8 minutes on one H100. `--commit NAME` where this is no git repository.
set -uo pipefail
cd "$(dirname "$0")/.."
export JAX_PLATFORMS=cuda

commit=()
if [ $# = 2 ] && [ "$1" = --commit ]; then
    commit=("$@")
elif [ $# != 0 ]; then
    echo "$*: unknown. Use nothing, or --commit NAME." >&2
    exit 2
fi
python=$(command -v python || command -v python3) || {
    echo "There is no python on the PATH. Activate an environment with jaxsp[cuda13,test]." >&2
    exit 2
}

machine=$(timeout 120 "$python" -m scripts.bench.machine) || {
    code=$?
    [ $code != 124 ] || echo "JAX did not find its devices within 120 s." >&2
    exit $code
}
echo "$machine"
said() { sed -n "s/^$1 *//p" <<< "$machine"; }
device=$(said device)
name=$(tr -cs '[:alnum:]\n' - <<< "${device#NVIDIA }" | tr '[:upper:]' '[:lower:]')
when=$(date -u +%Y-%m-%dT%H%M)
results=scripts/bench/results/$when-$name.json
failed=0

echo "== tests/gpu"
# a test that was skipped here would be one that nobody ever runs, so pytest says which
tests=$(timeout --kill-after=10 270 "$python" -m pytest tests/gpu -rs 2>&1 | tee >(cat >&2) | tail -n 1) || {
    [ $? != 124 ] || tests="not done after 270 s"
    failed=1
}
[[ $tests == *passed* ]] || failed=1

echo "== training step"
# what the tests left of 460 s; a case takes about 30, and the last may begin 75 before the end
left=$((460 - SECONDS))
timeout --kill-after=10 $left "$python" -m scripts.bench.step --shapes llama8b-2layers qwen3-0.6b --lengths 32768 8192 \
    --steps 5 --seconds $((left - 80)) --case-seconds 75 --out "$results" "${commit[@]}" || failed=1
figures="no numbers"
[ ! -f "$results" ] || figures="$("$python" -m scripts.bench.report "$results") ([all cases](results/${results##*/}))"

versions="${commit[1]:-$(said commit)}, driver $(said driver), jax $(said jax)"
echo "- $when, $device, $versions: tests: ${tests:-none}; step: $figures" | tee -a scripts/bench/LOG.md
exit $failed
