#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: prints what is there, runs tests/gpu, times the training step, and what memory levers cost in
# time, keeps the numbers in scripts/bench/results/ and adds a line to scripts/bench/LOG.md. All parts run; exit code 1 if one
# failed. Without a GPU: one line, and exit code 2. Ended after less than 10 minutes. `--commit NAME` where this is no git
# repository.
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
results=scripts/bench/results/$when-$name
failed=0

echo "== tests/gpu"
# a test that was skipped here would be one that nobody ever runs, so pytest says which
tests=$(timeout --kill-after=10 240 "$python" -m pytest tests/gpu -rs 2>&1 | tee >(cat >&2) | tail -n 1) || {
    [ $? != 124 ] || tests="not done after 240 s"
    failed=1
}
[[ $tests == *passed* ]] || failed=1

figures=""
# time_step NAME UNTIL OPTIONS: the benchmark with these, ended so many seconds after this script began; figures get its own
time_step() {
    local file=$results-$1.json left=$(($2 - SECONDS))
    # a case takes about 30 s, and the last may begin 65 before the end
    timeout --kill-after=10 $left "$python" -m scripts.bench.step --steps 5 --seconds $((left - 65)) --case-seconds 60 \
        --out "$file" "${commit[@]}" "${@:3}" || failed=1
    local found="no numbers"
    [ ! -f "$file" ] || found="$("$python" -m scripts.bench.report "$file") ([all cases](results/${file##*/}))"
    figures+="; $1: $found"
}

echo "== training step"
time_step step 430 --shapes llama8b-2layers qwen3-0.6b --lengths 32768 8192
echo "== memory levers"
time_step levers 580 --shapes llama8b-2layers --lengths 32768 --documents one \
    --remat attention full --offload-activations none residual_and_attention

versions="${commit[1]:-$(said commit)}, driver $(said driver), jax $(said jax)"
echo "- $when, $device, $versions: tests: ${tests:-none}$figures" | tee -a scripts/bench/LOG.md
exit $failed
