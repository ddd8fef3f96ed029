#!/usr/bin/env bash
# What only a GPU can show of the kernels: their tests on the device, and their speed; under 20 minutes.
# Usage: bash bench/gpu.sh [OUT [PART...]]
# OUT: folder for logs and numbers; default bench/results/<gpu>/<date>_kernels. PART: ops, gpu, bench; default: all.
# Every part runs, each within its own time; the exit code is that of the first one that failed, 2 without a GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=".:kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET

gpu=$(python3 - <<'PYTHON'
import sys
try:
    import torch
    import triton
except ImportError as error:
    sys.exit(f"bench/gpu.sh: {error}; install torch and triton")
if not torch.cuda.is_available():
    sys.exit("bench/gpu.sh: torch sees no CUDA device; run this on a machine with a GPU")
print(torch.cuda.get_device_name().lower().replace(" ", "-"))
PYTHON
) || exit 2

out=${1:-bench/results/$gpu/$(date -u +%F)_kernels}
parts=${*:2}
mkdir -p "$out"
code=0
: >"$out/summary.txt"

# part NAME SECONDS COMMAND...: runs it, logs it, notes how it ended.
part() {
    local name=$1 seconds=$2 began=$SECONDS ended result
    shift 2
    if [ -n "$parts" ] && [[ " $parts " != *" $name "* ]]; then return; fi
    echo "== $name: $*"
    timeout --kill-after=10 "$seconds" "$@" 2>&1 | tee "$out/$name.log"
    ended=${PIPESTATUS[0]}
    case $ended in
        0) result=passed ;;
        124 | 137) result="stopped after $seconds s" ;;
        *) result="failed ($ended)" ;;
    esac
    echo "$name: $result, $((SECONDS - began)) s" >>"$out/summary.txt"
    if [ "$ended" -ne 0 ] && [ "$code" -eq 0 ]; then code=$ended; fi
}

python3 -c 'from bench.record import Fingerprint; print(Fingerprint.here())' | tee "$out/environment.txt"
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,power.limit --format=csv |
    tee -a "$out/environment.txt"
part ops 480 python3 -m pytest -q tests/ops
part gpu 120 python3 -m pytest -q -m gpu --ignore=tests/ops --continue-on-collection-errors tests
part bench 540 python3 -m bench op --json "$out/bench.jsonl"

echo "== $out"
cat "$out/summary.txt"
exit "$code"
