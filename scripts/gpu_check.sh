#!/usr/bin/env bash
# Tests and measures on a machine with an NVIDIA GPU, in stages of at most 8 minutes each.
# scripts/README.md describes the stages.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v python || command -v python3) || {
    echo "There is no python on the PATH. Activate an environment with jaxsp[cuda13,test]." >&2
    exit 2
}
exec "$python" -m scripts.gpu_check "$@"
