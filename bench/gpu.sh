#!/usr/bin/env bash
# All that is worth measuring on one GPU, in under 20 minutes and without a network: whether the kernels are right on
# the device, their speed, steps of real models alone and against their peers, loaders, and a page about all of it.
#
# Usage: bash bench/gpu.sh [--smoke] [OUT [PART...]]
#   --smoke  smallest sizes, with or without a GPU: does everything run?
#   OUT      folder for logs and records; default: bench/results/<gpu>/<date>_gpu
#   PART     ops, gpu, op, step, peer, data, report, or one of a group's, such as op-attention; default: all.
#            A part that is named has 570 seconds; of all together each has its share and what those before it left.
#
# A part that fails or takes too long does not keep the next ones from running; one whose package is missing is left
# out. OUT/summary.txt says how each ended. The exit code is that of the first one that failed, 2 without a GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=".:kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET

smoke=
if [ "${1:-}" = --smoke ]; then
    smoke=--smoke
    shift
fi

machine=$(python3 - $smoke <<'PYTHON'
import sys
try:
    import torch
    import triton
    from bench.fingerprint import machine
except ImportError as error:
    sys.exit(f"bench/gpu.sh: {error}; install fastdiff and what it requires")
if not torch.cuda.is_available() and "--smoke" not in sys.argv:
    sys.exit("bench/gpu.sh: torch sees no CUDA device; run this on a machine with a GPU, or try it with --smoke")
print(machine())
PYTHON
) || exit 2

out=${1:-bench/results/$machine/$(date -u +%F)_gpu${smoke:+-smoke}}
parts=${*:2}
mkdir -p "$out"
code=0
most=570
budget=0
: >"$out/summary.txt"
SECONDS=0

# part NAME SHARE PACKAGES COMMAND...: runs it and notes how it ended. NAME is that of its group, or begins with it;
# SHARE of the time in seconds; PACKAGES that it needs, separated by spaces.
part() {
    local name=$1 seconds=$((budget += $2, budget - SECONDS)) packages=$3 began=$SECONDS ended result package
    shift 3
    if [ -n "$parts" ]; then
        if [[ " $parts " != *" $name "* && " $parts " != *" ${name%%-*} "* ]]; then return; fi
        seconds=$most
    fi
    for package in $packages; do
        if ! python3 -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$package') is None)"; then
            echo "$name: left out, $package is not installed" | tee -a "$out/summary.txt"
            return
        fi
    done
    if [ "$seconds" -gt "$most" ]; then seconds=$most; fi
    if [ "$seconds" -lt 1 ]; then seconds=1; fi
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

# bench NAME SHARE PACKAGES COMMAND...: a part that is a command of python -m bench.
bench() {
    part "$1" "$2" "$3" python3 -m bench "$4" $smoke --out "$out" "${@:5}"
}

python3 -c 'from bench.fingerprint import Fingerprint; print(Fingerprint.here())' | tee "$out/environment.txt"

tests=(tests/ops) on_gpu=(-m gpu)
kernels=(group_norm adaln loss noising philox)
dit=dit-xl-2 unet=sd2-512 small=dit-s-2
few=(--batch 32) many=(--batch 128) swept=(--find-batch --sweep compile=true,false)
if [ -n "$smoke" ]; then
    tests=(tests/ops/test_dispatch.py) on_gpu=(-m gpu --collect-only)
    kernels=(philox)
    dit=digits unet=digits-t2i small=digits
    few=(--batch 2) many=(--batch 2) swept=(--batch 2 --sweep compile=false)
fi

part ops 120 pytest python3 -m pytest -q "${tests[@]}"
part gpu 40 pytest python3 -m pytest -q "${on_gpu[@]}" --ignore=tests/ops --continue-on-collection-errors tests
bench op-kernels 150 "" op "${kernels[@]}"
bench op-attention 40 "" op attention
bench op-optimizer 40 "" op adamw8bit
for preset in $dit $unet; do
    bench "step-$preset" 210 deepspeed step --preset $preset --precision bf16 "${swept[@]}"
done
bench peer-dit 110 deepspeed step --preset $dit --precision bf16 "${few[@]}" --peer dit
bench peer-diffusers 130 "deepspeed diffusers transformers accelerate" \
    step --preset $unet --precision bf16 "${few[@]}" --peer diffusers
bench peer-plain 60 deepspeed step --preset $small --precision bf16 "${many[@]}" --peer plain
bench data 60 "" data
part report 30 jinja2 python3 -m bench report "$out/report.html" "$out"

echo "== $out"
cat "$out/summary.txt"
exit "$code"
