#!/usr/bin/env bash
# All measurements on one GPU, in under 20 minutes and without a network: tests of the kernels, their speed, training
# steps of real models alone and against other trainers, readers, and a page about all of it.
#
# Usage: bash bench/gpu.sh [--smoke] [--seconds N] [OUT [PART...]]
#   --smoke      smallest sizes, with or without a GPU: does everything run?
#   --seconds N  for all that is asked for together; default: 1200, or 540 if parts are named
#   OUT          folder for logs and records; default: bench/results/<gpu>/<date>_gpu
#   PART         a part or a group of the list below; default: all
#
# Group    Parts                                     Needs, by the names to import
# all                                                torch triton numpy psutil tqdm typing_extensions
#                                                    pydantic pydantic_core annotated_types typing_inspection
# ops      tests of the kernels                      pytest hypothesis scipy; faster with xdist
# gpu      other tests that need a GPU               pytest hypothesis sklearn PIL and what step needs
# op       op-philox op-loss op-noising              other libraries: bitsandbytes liger_kernel
#          op-adamw8bit op-attention
#          op-adaln op-group_norm op-dropout
# step     step-dit step-sd2: a sweep of batches     deepspeed hjson tyro docstring_parser isal threadpoolctl
#          step-dit-eager step-sd2-eager             yaml safetensors einops msgpack packaging
# peer     peer-dit peer-plain                       what step needs; PIL
#          peer-diffusers                            also diffusers transformers accelerate
# data                                               isal webdataset; as another reader: nvidia.dali
# largest  largest-dit largest-sd2: largest batch    what step needs
# report   a page about the records in OUT           jinja2 matplotlib
#
# Every part has a share of the time and what those before it left; one that takes longer is interrupted, and keeps the
# records that it has written by then. A part that fails does not keep the next ones from running; one whose packages
# are missing is left out. OUT/summary.txt says how each ended. Where .git is missing, FASTDIFF_COMMIT is the commit
# that the records name. Exit code: that of the first part that failed (124: no time), 1 if none ran, 2 for a mistake.
set -uo pipefail
SECONDS=0

mistake() {
    printf 'bench/gpu.sh: %s\nUsage: bash bench/gpu.sh [--smoke] [--seconds N] [OUT [PART...]]; more with --help\n' \
        "$1" >&2
    exit 2
}

smoke='' total=''
while [[ ${1:-} == -* ]]; do
    case $1 in
        --smoke) smoke=--smoke ;;
        --seconds)
            total=${2:-}
            [[ $total =~ ^[1-9][0-9]{0,5}$ ]] || mistake "--seconds ${total:-(nothing)}: expected seconds, above 0"
            shift
            ;;
        -h | --help)
            sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
            exit
            ;;
        *) mistake "there is no $1" ;;
    esac
    shift
done
given=${1:-} parts=("${@:2}")

cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH=".:kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET

dit=dit-xl-2-256 unet=sd2-512 small=dit-s-2-256
kernels=(tests/ops) on_gpu=(-m gpu)
dit_batches=128,256,64 unet_batches=32,64,16 dit_batch=128 unet_batch=32
dit_rounds=(--batch 32 --rounds 3 --steps 5) unet_rounds=(--batch 8 --rounds 3 --steps 4)
small_rounds=(--batch 128 --rounds 5 --steps 10) read=(--samples 1024 --sample-kb 151 --rounds 3) memory=()
if [ -n "$smoke" ]; then
    dit=digits unet=digits-t2i small=digits
    kernels=(tests/ops/test_dispatch.py) on_gpu=(-m gpu --collect-only)
    dit_batches=4,8 unet_batches=2 dit_batch=4 unet_batch=2
    dit_rounds=(--batch 2) unet_rounds=(--batch 2) small_rounds=(--batch 2) read=() memory=(--memory 1 --steps 1)
fi

# Runs "$do NAME SHARE PACKAGES COMMAND..." for every part: SHARE of 1200 s; PACKAGES that it needs, in one word.
each_part() {
    local step="deepspeed hjson tyro docstring_parser isal threadpoolctl yaml"
    # Without the strictness of pyproject.toml, under which plugins of pytest would have to be installed.
    local test=(python3 -m pytest -o "addopts=-ra --import-mode=importlib" -q)
    "$do" ops 90 "pytest hypothesis scipy" env OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
        "${test[@]}" "${workers[@]}" --junitxml "$out/ops.xml" "${kernels[@]}"
    "$do" gpu 50 "pytest $step" "${test[@]}" --junitxml "$out/gpu.xml" "${on_gpu[@]}" "${without_dali[@]}" \
        --continue-on-collection-errors "${on_gpu_files[@]}"
    bench op-philox 10 "" op philox
    bench op-loss 20 "" op loss
    bench op-noising 25 "" op noising
    bench op-adamw8bit 30 "" op adamw8bit
    bench op-attention 35 "" op attention
    bench op-adaln 55 "" op adaln
    bench op-group_norm 60 "" op group_norm
    bench op-dropout 15 "" op dropout
    bench step-dit 160 "$step" step --preset $dit --precision bf16 --sweep batch=$dit_batches
    bench step-sd2 160 "$step" step --preset $unet --precision bf16 --sweep batch=$unet_batches
    bench step-dit-eager 35 "$step" step --preset $dit --precision bf16 --no-compile --batch $dit_batch
    bench step-sd2-eager 35 "$step" step --preset $unet --precision bf16 --no-compile --batch $unet_batch
    bench peer-dit 90 "$step PIL" step --preset $dit --precision bf16 "${dit_rounds[@]}" --peer dit
    bench peer-plain 60 "$step PIL" step --preset $small --precision bf16 "${small_rounds[@]}" --peer plain
    bench peer-diffusers 110 "$step PIL diffusers transformers accelerate" \
        step --preset $unet --precision bf16 "${unet_rounds[@]}" --peer diffusers
    bench data 60 "isal webdataset" data "${read[@]}"
    bench largest-dit 40 "$step" step --preset $dit --precision bf16 --find-batch "${memory[@]}"
    bench largest-sd2 40 "$step" step --preset $unet --precision bf16 --find-batch "${memory[@]}"
    "$do" report 20 "jinja2 matplotlib" python3 -m bench report "$out/report.html" "$out"
}

# The same for a command of python -m bench.
bench() {
    "$do" "$1" "$2" "pydantic $3" python3 -m bench "$4" $smoke --out "$out" "${@:5}"
}

# Whether the part of this name is asked for, itself or by its group.
chosen() {
    [ ${#parts[@]} -eq 0 ] || [[ " ${parts[*]} " == *" $1 "* || " ${parts[*]} " == *" ${1%%-*} "* ]]
}

known=' ' shares=0
plan() {
    local group=${1%%-*}
    [[ $known == *" $group "* ]] || known+="$group "
    [[ $known == *" $1 "* ]] || known+="$1 "
    ! chosen "$1" || ((shares += $2))
}

code=0 ran=0 share=0
run() {
    local name=$1 seconds packages=$3 missing began=$SECONDS ended result log running
    chosen "$name" || return
    seconds=$((total * (share += $2) / shares - SECONDS)) log=$out/$name.log
    shift 3
    # shellcheck disable=SC2086 # several words
    missing=$(python3 -c 'import sys; from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if find_spec(name) is None])' $packages)
    if [ -n "$missing" ]; then
        echo "$name: left out, not installed: $missing" | tee -a "$out/summary.txt"
        return
    fi
    if [ "$seconds" -lt 1 ]; then
        echo "$name: left out, no time is left" | tee -a "$out/summary.txt"
        [ "$code" -ne 0 ] || code=124
        return
    fi
    echo "== $name, $seconds s: $*"
    # A file and not a pipe: what outlives the part may keep it open. A shell's background commands ignore interrupts.
    : >"$log"
    env --default-signal=INT timeout --signal=INT --kill-after=20 "$seconds" "$@" >>"$log" 2>&1 </dev/null &
    running=$!
    tail -n +1 -s 0.1 -f --pid="$running" "$log" &
    wait "$running"
    ended=$?
    kill -KILL -- "-$running" 2>/dev/null # what is left of its process group
    wait
    ran=1
    case $ended in
        0) result=passed ;;
        124 | 137) result="stopped after $seconds s" ;;
        *) result="failed ($ended)" ;;
    esac
    echo "$name: $result, $((SECONDS - began)) s" >>"$out/summary.txt"
    if [ "$ended" -ne 0 ] && [ "$code" -eq 0 ]; then code=$ended; fi
}

interrupted() {
    local process running
    trap '' INT TERM
    running=$(jobs -p)
    for process in $running; do kill "$process" 2>/dev/null; done
    wait
    for process in $running; do kill -KILL -- "-$process" 2>/dev/null; done
    echo "interrupted" >>"$out/summary.txt"
    exit 130
}

out=$given do=plan workers=() without_dali=() on_gpu_files=()
each_part
for part in "${parts[@]}"; do
    [[ $known == *" $part "* ]] || mistake "there is no part ${part:-(nothing)}; expected some of:${known% }"
done
[[ -z $given || $known != *" $given "* ]] || mistake "OUT, the folder, comes before the part $given"

machine=$(python3 - $smoke <<'PYTHON'
import sys
try:
    import torch
    import triton
    from bench.records.fingerprint import machine
except ImportError as error:
    sys.exit(f"bench/gpu.sh: {error}; install fastdiff and what it requires")
if not torch.cuda.is_available() and "--smoke" not in sys.argv:
    sys.exit("bench/gpu.sh: torch sees no CUDA device; run this on a machine with a GPU, or try it with --smoke")
print(machine())
PYTHON
) || exit 2

if [ -z "$total" ]; then
    if [ ${#parts[@]} -eq 0 ]; then total=1200; else total=540; fi
fi
out=${given:-bench/results/$machine/$(date -u +%F)_gpu${smoke:+-smoke}} do=run
mkdir -p "$out" || exit 2
: >"$out/summary.txt"
trap interrupted INT TERM
has() { python3 -c "import $1" >/dev/null 2>&1; }
! has xdist || workers=(-n auto)
has nvidia.dali || without_dali=(-k "not dali")
mapfile -t on_gpu_files < <(grep -rl --include='test_*.py' --exclude-dir=ops 'pytest\.mark\.gpu' tests)
python3 -c 'from bench.records.fingerprint import Fingerprint; print(Fingerprint.here())' | tee "$out/environment.txt"
each_part

echo "== $out"
cat "$out/summary.txt"
echo "To take it away: tar -C $(printf %q "$(dirname "$out")") -czf gpu.tar.gz $(printf %q "$(basename "$out")")"
[ "$ran" -eq 1 ] || echo "bench/gpu.sh: nothing ran" >&2
[ "$ran" -eq 1 ] || [ "$code" -ne 0 ] || code=1
exit "$code"
