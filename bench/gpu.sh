#!/usr/bin/env bash
# All measurements on one GPU, without a network: the first minutes of the project on it, tests of the kernels, their
# speed, training steps of real models alone and against other trainers, readers, and a page with the targets.
#
# Usage: bash bench/gpu.sh [--smoke] [--seconds N] [OUT] [PART...]
#   --smoke      smallest sizes, with or without a GPU: does everything run?
#   --seconds N  for all that is asked for together; default: 510 if parts are named, otherwise as long as they take
#   OUT          folder for logs and records, with a slash in its name; default: bench/results/<gpu>/<date>_gpu
#   PART         a part or a group of the list below; default: all, in this order
#
# Group    Parts                                     Needs, by the names to import
# all                                                torch triton numpy psutil rich typing_extensions
#                                                    pydantic pydantic_core annotated_types typing_inspection
# doctor                                             what step needs
# ops      tests of the kernels                      pytest hypothesis scipy; faster with xdist
# gpu      other tests that need a GPU               pytest hypothesis sklearn PIL and what step needs
# runs     tiny runs of every kind                   what gpu needs; diffusers transformers peft bitsandbytes
# step     step-dit step-dit-small step-dit-eager    deepspeed hjson tyro docstring_parser isal threadpoolctl
#          step-sd2 step-sd2-small step-sd2-eager    yaml safetensors einops msgpack packaging
# op       op-philox op-loss op-noising              other libraries: bitsandbytes liger_kernel
#          op-adamw op-adamw8bit op-attention
#          op-adaln op-group_norm op-dropout
#          op-bias_gradient op-gelu op-geglu op-weight_gradient
# peer     peer-dit peer-plain                       what step needs; PIL
#          peer-diffusers                            also diffusers transformers accelerate
# checkpoint                                         what step needs
# largest  largest-dit largest-sd2: largest batch    what step needs
# data                                               isal webdataset; as another reader: nvidia.dali
# memcheck the kernels under compute-sanitizer       pytest hypothesis scipy; compute-sanitizer of CUDA
# report   a page about the records in OUT           jinja2
#
# Every part ends within 540 s, so that it can be a call of its own: one that takes longer is interrupted, and keeps the
# records that it has written by then, and what torch.compile has cached for the next call. A part that fails does not
# keep the next ones from running; one whose packages are missing is left out. OUT/summary.txt says how each ended, and
# OUT/README.md which targets the records meet; calls with the same OUT add to both. Where .git is missing,
# FASTDIFF_COMMIT is the commit that the records name. Exit code: that of the first part that failed (124: no time), 1
# if none ran, 2 for a mistake.
set -uo pipefail
SECONDS=0

mistake() {
    printf 'bench/gpu.sh: %s\nUsage: bash bench/gpu.sh [--smoke] [--seconds N] [OUT] [PART...]; more with --help\n' \
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
given=''
if [[ ${1:-} == */* ]]; then
    given=$1
    shift
fi
parts=("$@")

cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH=".:kernels:bench${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET

dit=dit-xl-2-256 unet=sd2-512 small=dit-s-2-256
kernels=(tests/ops) on_gpu=(-m gpu) tiny=(tests/gpu -m gpu)
dit_batch=256 dit_small=128,64 unet_batch=64 unet_small=16 saved=(--batch 64)
dit_rounds=(--batch 32 --rounds 3 --steps 5) unet_rounds=(--batch 8 --rounds 3 --steps 4)
small_rounds=(--batch 128 --rounds 5 --steps 10) read=(--samples 1024 --sample-kb 151 --rounds 3) memory=()
if [ -n "$smoke" ]; then
    dit=digits unet=digits-t2i small=digits
    kernels=(tests/ops/test_dispatch.py) on_gpu=(-m gpu --collect-only) tiny=(--collect-only tests/gpu)
    dit_batch=4 dit_small=4,8 unet_batch=2 unet_small=1 saved=(--batch 2)
    dit_rounds=(--batch 2) unet_rounds=(--batch 2) small_rounds=(--batch 2) read=() memory=(--memory 1 --steps 1)
fi

# Runs "$do NAME SECONDS PACKAGES COMMAND..." for every part, with its limit, and the packages it needs in one word.
# First what says whether anything works, then what the targets are about.
each_part() {
    local step="deepspeed hjson tyro docstring_parser isal threadpoolctl yaml"
    # Without the strictness of pyproject.toml, under which plugins of pytest would have to be installed.
    local test=(python3 -m pytest -o "addopts=-ra --import-mode=importlib" -q)
    "$do" doctor 90 "pydantic $step" \
        python3 -c 'from fastdiff.cli.main import entry; entry()' doctor --preset $dit
    "$do" ops 300 "pytest hypothesis scipy" env OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
        "${test[@]}" "${workers[@]}" --junitxml "$out/ops.xml" "${kernels[@]}"
    "$do" gpu 150 "pytest $step" "${test[@]}" --junitxml "$out/gpu.xml" "${on_gpu[@]}" "${without_dali[@]}" \
        --continue-on-collection-errors "${on_gpu_files[@]}"
    "$do" runs 540 "pytest $step diffusers transformers peft bitsandbytes" "${test[@]}" "${few_workers[@]}" \
        --junitxml "$out/runs.xml" "${tiny[@]}"
    bench step-dit 360 "$step" step --preset $dit --precision bf16 --batch $dit_batch
    bench step-sd2 540 "$step" step --preset $unet --precision bf16 --batch $unet_batch
    bench step-dit-eager 150 "$step" step --preset $dit --precision bf16 --no-compile --batch $dit_batch
    bench step-sd2-eager 180 "$step" step --preset $unet --precision bf16 --no-compile --batch $unet_batch
    bench op-philox 40 "" op philox
    bench op-loss 60 "" op loss
    bench op-noising 60 "" op noising
    bench op-adamw 80 "" op adamw
    bench op-adamw8bit 80 "" op adamw8bit
    bench op-attention 120 "" op attention
    bench op-adaln 150 "" op adaln
    bench op-group_norm 240 "" op group_norm
    bench op-dropout 60 "" op dropout
    bench op-gelu 60 "" op gelu
    bench op-geglu 60 "" op geglu
    bench op-bias_gradient 60 "" op bias_gradient
    bench op-weight_gradient 60 "" op weight_gradient
    bench step-dit-small 420 "$step" step --preset $dit --precision bf16 --sweep batch=$dit_small
    bench step-sd2-small 540 "$step" step --preset $unet --precision bf16 --batch $unet_small
    bench peer-dit 420 "$step PIL" step --preset $dit --precision bf16 "${dit_rounds[@]}" --peer dit
    bench peer-plain 240 "$step PIL" step --preset $small --precision bf16 "${small_rounds[@]}" --peer plain
    bench peer-diffusers 540 "$step PIL diffusers transformers accelerate" \
        step --preset $unet --precision bf16 "${unet_rounds[@]}" --peer diffusers
    bench checkpoint 420 "$step" checkpoint --preset $dit --precision bf16 "${saved[@]}"
    bench largest-dit 420 "$step" step --preset $dit --precision bf16 --find-batch "${memory[@]}"
    bench largest-sd2 540 "$step" step --preset $unet --precision bf16 --find-batch "${memory[@]}"
    bench data 180 "isal webdataset" data "${read[@]}"
    "$do" memcheck 540 "pytest hypothesis scipy $no_sanitizer" "${checked[@]}" "${test[@]}" "${kernels[@]}"
    "$do" report 60 "jinja2" python3 -m fastdiff_bench report "$out/report.html" "$out"
}

# The same for a command of fastdiff bench.
bench() {
    "$do" "$1" "$2" "pydantic $3" python3 -m fastdiff_bench "$4" $smoke --out "$out" "${@:5}"
}

# Whether the part of this name is asked for, itself or by its group.
chosen() {
    [ ${#parts[@]} -eq 0 ] || [[ " ${parts[*]} " == *" $1 "* || " ${parts[*]} " == *" ${1%%-*} "* ]]
}

known=' '
plan() {
    local group=${1%%-*}
    [[ $known == *" $group "* ]] || known+="$group "
    [[ $known == *" $1 "* ]] || known+="$1 "
}

# Notes how a part ended, in place of what an earlier call noted.
note() {
    local before
    before=$(grep -v "^$1: " "$out/summary.txt")
    { [ -z "$before" ] || printf '%s\n' "$before"; printf '%s: %s\n' "$1" "$2"; } >"$out/summary.new"
    mv "$out/summary.new" "$out/summary.txt"
}

code=0 ran=0
run() {
    local name=$1 seconds=$2 packages=$3 missing began=$SECONDS ended result log running
    chosen "$name" || return
    [ -z "$total" ] || seconds=$((total - SECONDS < seconds ? total - SECONDS : seconds))
    log=$out/$name.log
    shift 3
    # shellcheck disable=SC2086 # several words
    missing=$(python3 -c 'import sys; from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if find_spec(name) is None])' $packages)
    if [ -n "$missing" ]; then
        echo "$name: left out, not installed: $missing"
        note "$name" "left out, not installed: $missing"
        return
    fi
    if [ "$seconds" -lt 1 ]; then
        echo "$name: left out, no time is left"
        note "$name" "left out, no time is left"
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
    # The doctor finds problems and ends with 0.
    if [ "$ended" -eq 0 ] && [ "$name" = doctor ] && grep -q '^PROBLEM' "$log"; then ended=1; fi
    case $ended in
        0) result=passed ;;
        124 | 137) result="stopped after $seconds s" ;;
        *) result="failed ($ended)" ;;
    esac
    note "$name" "$result, $((SECONDS - began)) s"
    targets
    if [ "$ended" -ne 0 ] && [ "$code" -eq 0 ]; then code=$ended; fi
}

# Which targets the records meet so far; replaced whole, so that a call that is cut leaves the last one.
targets() {
    if python3 -m fastdiff_bench.records.targets "$out" >"$out/README.new" 2>>"$out/targets.log"; then
        mv "$out/README.new" "$out/README.md"
        rm -f "$out/targets.log"
    fi
}

interrupted() {
    local process running
    trap '' INT TERM
    running=$(jobs -p)
    for process in $running; do kill "$process" 2>/dev/null; done
    wait
    for process in $running; do kill -KILL -- "-$process" 2>/dev/null; done
    echo "interrupted" >>"$out/summary.txt"
    targets
    exit 130
}

out=$given do=plan workers=() few_workers=() without_dali=() on_gpu_files=() checked=() no_sanitizer=''
each_part
for part in "${parts[@]}"; do
    [[ $part != */* ]] || mistake "OUT, the folder $part, comes before the parts"
    [[ $known == *" $part "* ]] || mistake "there is no part ${part:-(nothing)}; expected some of:${known% }"
done

machine=$(python3 - $smoke <<'PYTHON'
import sys
try:
    import torch
    import triton
    from fastdiff_bench.records.fingerprint import machine
except ImportError as error:
    sys.exit(f"bench/gpu.sh: {error}; install fastdiff and what it requires")
if not torch.cuda.is_available() and "--smoke" not in sys.argv:
    sys.exit("bench/gpu.sh: torch sees no CUDA device; run this on a machine with a GPU, or try it with --smoke")
print(machine())
PYTHON
) || exit 2

# A part may take 20 s to end after its time.
[ -n "$total" ] || [ ${#parts[@]} -eq 0 ] || total=510
out=${given:-bench/results/$machine/$(date -u +%F)_gpu${smoke:+-smoke}} do=run
mkdir -p "$out" || exit 2
touch "$out/summary.txt"
sed -i '/^interrupted$/d' "$out/summary.txt"
trap interrupted INT TERM
has() { python3 -c "import $1" >/dev/null 2>&1; }
! has xdist || workers=(-n auto) few_workers=(-n 4)
mapfile -t on_gpu_files < <(grep -rl --include='test_*.py' --exclude-dir={ops,gpu} 'pytest\.mark\.gpu' tests)
if ! has nvidia.dali; then
    without_dali=(-k "not dali")
    mapfile -t on_gpu_files < <(grep -L decode_dali "${on_gpu_files[@]}") # those import it
fi
PATH=$PATH:/usr/local/cuda/bin
command -v compute-sanitizer >/dev/null || no_sanitizer=compute-sanitizer
checked=(compute-sanitizer --tool memcheck --error-exitcode 9 --target-processes all)
python3 -c 'from fastdiff_bench.records.fingerprint import Fingerprint; print(Fingerprint.here())' | tee "$out/environment.txt"
each_part

echo "== $out"
cat "$out/summary.txt"
echo "To take it away: tar -C $(printf %q "$(dirname "$out")") -czf gpu.tar.gz $(printf %q "$(basename "$out")")"
[ "$ran" -eq 1 ] || echo "bench/gpu.sh: nothing ran" >&2
[ "$ran" -eq 1 ] || [ "$code" -ne 0 ] || code=1
exit "$code"
