#!/usr/bin/env bash
# Measurements on one GPU, without a network, in the order of what they decide: training steps of real models alone and
# against other trainers, the kernels' speed, tests, and a page with the targets.
#
# Usage: bash bench/gpu.sh [--smoke] [--seconds N] [OUT] [PART...]
#   --smoke      smallest sizes, with or without a GPU: does everything run?
#   --seconds N  for all that is asked for together; default: 510 if parts are named, otherwise as long as they take
#   OUT          folder for logs and records, with a slash in its name; default: bench/results/<gpu>/<date>_gpu
#   PART         a part or a group of the list below; default: all, in this order
#
# Group       Parts                                  Needs, by the names to import
# all                                                torch triton numpy psutil rich typing_extensions
#                                                    pydantic pydantic_core annotated_types typing_inspection
# step        step-dit step-dit-zero1                deepspeed hjson tyro docstring_parser isal threadpoolctl
#             step-dit-short step-dit-graph          yaml safetensors einops msgpack packaging
#             step-dit-fp8 step-dit-fp8-wgrad
#             step-sd2 step-dit-32
#             step-dit-deterministic
# peer        peer-dit peer-plain                    what step needs; PIL
#             peer-diffusers                         also diffusers transformers accelerate
# op          op-adaln op-attention op-fp8 op-gelu   other libraries: bitsandbytes liger_kernel
#             op-geglu op-swiglu op-rotary
#             op-group_norm op-adamw8bit
#             op-adamw op-weight_gradient
#             op-bias_gradient op-loss op-noising
#             op-dropout op-philox
# start       start-cold start-warm                  what step needs
# checkpoint                                         what step needs
# doctor                                             what step needs
# ops         tests of the kernels                   pytest hypothesis scipy; faster with xdist
# gpu         other tests that need a GPU            pytest hypothesis sklearn PIL and what step needs
# runs        tiny runs of every kind                what gpu needs; diffusers transformers peft bitsandbytes
# memcheck    the kernels under compute-sanitizer    pytest hypothesis scipy; compute-sanitizer of CUDA
# report      a page about the records in OUT        jinja2
#
# OUT/clocks.csv has clocks, power and temperature of every second, where there is nvidia-smi. The limits of the GPU are
# measured once; the other parts read them.
#
# Every part ends within 540 s, so that it can be a call of its own: one that takes longer is interrupted, and keeps the
# records that it has written by then, and what torch.compile has cached for the next call. A part that fails does not
# keep the next ones from running; one whose packages are missing is left out. OUT/summary.txt says how each ended, and
# OUT/README.md which targets the records meet; calls with the same OUT add to both. Where .git is missing,
# FASTDIFF_COMMIT is the commit that the records name. Exit code: that of the first part that failed (124: no time), 1
# if none ran, 2 for a mistake.
# shellcheck disable=SC2329 # functions are called through $do
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
            sed -n '/^# shellcheck/d; 2,/^[^#]/s/^# \{0,1\}//p' "$0"
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

dit=(--preset dit-xl-2-256 --precision bf16) unet=(--preset sd2-512 --precision bf16)
few=(--rounds 2 --steps 10) short=(--rounds 2 --steps 1) traced=(--rounds 2 --steps 10 --trace) fp8=()
dit_rounds=(--batch 32 --rounds 4 --steps 5) unet_rounds=(--batch 8 --rounds 3 --steps 4)
plain_rounds=(--preset dit-s-2-256 --precision bf16 --batch 128 --rounds 4 --steps 8)
small_batch=32 start_batch=64 graphs=(--sweep "cuda_graph=false,true")
kernels=(tests/ops) on_gpu=(-m gpu) tiny=(tests/gpu -m gpu)
if [ -n "$smoke" ]; then
    dit=(--preset digits) unet=(--preset digits-t2i) plain_rounds=(--preset digits --batch 2)
    few=() short=() traced=(--trace) fp8=(--preset dit-xl-2-256 --model depth=3 --no-compile)
    dit_rounds=(--batch 2) unet_rounds=(--batch 2) small_batch=2 start_batch=4
    kernels=(tests/ops/test_dispatch.py) on_gpu=(-m gpu --collect-only) tiny=(--collect-only tests/gpu)
fi

# Runs "$do NAME SECONDS PACKAGES COMMAND..." for every part, with its limit, and the packages it needs in one word.
# Time on a GPU is scarce: first what decides what to build next, last what can wait.
each_part() {
    local step="deepspeed hjson tyro docstring_parser isal threadpoolctl yaml"
    # Without the strictness of pyproject.toml, under which plugins of pytest would have to be installed.
    local test=(python3 -m pytest -o "addopts=-ra --import-mode=importlib" -q)
    local flat=(--deepspeed-config ddp)
    bench step-dit 170 "$step" step "${dit[@]}" "${flat[@]}" --batch "$dit_batch" "${traced[@]}"
    bench step-dit-zero1 100 "$step" step "${dit[@]}" --batch "$dit_batch" "${few[@]}"
    bench step-dit-short 100 "$step" step "${dit[@]}" "${flat[@]}" --attention short --batch "$dit_batch" "${few[@]}"
    bench step-dit-graph 100 "$step $no_gpu" step "${dit[@]}" "${flat[@]}" --cuda-graph --batch "$dit_batch" "${few[@]}"
    bench step-dit-fp8 150 "$step" step "${dit[@]}" "${fp8[@]}" "${flat[@]}" --precision bf16 --fp8 \
        --batch "$dit_batch" "${few[@]}"
    bench step-dit-fp8-wgrad 150 "$step" step "${dit[@]}" "${fp8[@]}" "${flat[@]}" --precision bf16 --fp8 \
        --fp8-weight-gradients bf16 --batch "$dit_batch" "${few[@]}"
    bench step-sd2 400 "$step" step "${unet[@]}" "${flat[@]}" --batch "$unet_batch" "${traced[@]}"
    bench peer-dit 180 "$step PIL" step "${dit[@]}" "${flat[@]}" "${dit_rounds[@]}" --peer dit
    bench peer-plain 150 "$step PIL" step "${plain_rounds[@]}" "${flat[@]}" --peer plain
    bench peer-diffusers 540 "$step PIL diffusers transformers accelerate" \
        step "${unet[@]}" "${flat[@]}" "${unet_rounds[@]}" --peer diffusers
    # Of every op the cases that take most time in a step.
    bench op-adaln 60 "" op adaln --case 'XL.*bfloat16'
    bench op-attention 80 "" op attention --case '(xl-16x256x72|4096x(64|40))-self'
    bench op-fp8 90 "" op fp8 --case 'XL.*bfloat16'
    bench op-gelu 30 "" op gelu --case 'XL bfloat16'
    bench op-geglu 30 "" op geglu --case '(4096|1024)x.*bfloat16'
    bench op-swiglu 30 "" op swiglu --case 'XL bfloat16'
    bench op-rotary 60 "" op rotary --case 'XL.*bfloat16'
    bench op-group_norm 90 "" op group_norm --case '(320x64x64|1280x16x16)-nhwc(-shift)? bfloat16'
    bench op-adamw8bit 40 "" op adamw8bit --case 'fp32-copy-ema'
    bench op-adamw 40 "" op adamw --case 'copy-ema'
    bench op-weight_gradient 30 "" op weight_gradient --case XL
    bench op-bias_gradient 30 "" op bias_gradient --case 'XL.*bfloat16'
    bench op-loss 30 "" op loss --case '(sd-4x64x64-epsilon|learned-variance) bfloat16'
    bench op-noising 30 "" op noising --case '(sd-4x64x64|dit-4x32x32-fp32-out) bfloat16'
    bench op-dropout 30 "" op dropout --case '128x64x64 bfloat16'
    bench op-philox 30 "" op philox
    bench step-dit-32 140 "$step" step "${dit[@]}" "${flat[@]}" --batch "$small_batch" "${graphs[@]}" "${few[@]}"
    bench step-dit-deterministic 100 "$step" step "${dit[@]}" "${flat[@]}" --deterministic \
        --batch "$dit_batch" "${few[@]}"
    # Two nodes that share compiled code alone.
    for node in cold warm; do
        "$do" "start-$node" 120 "pydantic $step" env -u TORCHINDUCTOR_CACHE_DIR -u TRITON_CACHE_DIR \
            FASTDIFF_CACHE="$scratch/cache" TMPDIR="$scratch/$node" python3 -m fastdiff_bench step $smoke --out "$out" "${dit[@]}" "${flat[@]}" --batch $start_batch \
            --compile "${short[@]}"
    done
    bench checkpoint 200 "$step" checkpoint "${dit[@]}" --batch "$start_batch"
    "$do" doctor 90 "pydantic $step" \
        python3 -c 'from fastdiff.cli.main import entry; entry()' doctor "${dit[@]:0:2}"
    "$do" ops 300 "pytest hypothesis scipy" env OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
        "${test[@]}" "${workers[@]}" --junitxml "$out/ops.xml" "${kernels[@]}"
    "$do" gpu 150 "pytest $step" "${test[@]}" --junitxml "$out/gpu.xml" "${on_gpu[@]}" "${without_dali[@]}" \
        --continue-on-collection-errors "${on_gpu_files[@]}"
    "$do" runs 540 "pytest $step diffusers transformers peft bitsandbytes" "${test[@]}" "${few_workers[@]}" \
        --junitxml "$out/runs.xml" "${tiny[@]}"
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
    local name=$1 seconds=$2 packages=$3 missing began=$SECONDS ended result log running shown
    chosen "$name" || return
    [ -z "$smoke" ] || seconds=$((10 * seconds)) # a CPU is slow, and nothing is measured
    [ -z "$total" ] || seconds=$((total - SECONDS < seconds ? total - SECONDS : seconds))
    log=$out/$name.log
    shift 3
    # shellcheck disable=SC2086 # several words
    missing=$(python3 -c 'import sys; from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if find_spec(name) is None])' $packages)
    if [ -n "$missing" ]; then
        echo "$name: left out, missing: $missing"
        note "$name" "left out, missing: $missing"
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
    shown=$!
    wait "$running"
    ended=$?
    kill -KILL -- "-$running" 2>/dev/null # what is left of its process group
    wait "$shown"
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

out=$given do=plan scratch='' no_gpu='' dit_batch=0 unet_batch=0 workers=() few_workers=() without_dali=() on_gpu_files=() checked=() no_sanitizer=''
each_part
for part in "${parts[@]}"; do
    [[ $part != */* ]] || mistake "OUT, the folder $part, comes before the parts"
    [[ $known == *" $part "* ]] || mistake "there is no part ${part:-(nothing)}; expected some of:${known% }"
done

read -r machine gib < <(python3 - $smoke <<'PYTHON'
import sys
try:
    import torch
    import triton
    from fastdiff_bench.records.fingerprint import machine
except ImportError as error:
    sys.exit(f"bench/gpu.sh: {error}; install fastdiff and what it requires")
if not torch.cuda.is_available() and "--smoke" not in sys.argv:
    sys.exit("bench/gpu.sh: torch sees no CUDA device; run this on a machine with a GPU, or try it with --smoke")
print(machine(), torch.cuda.get_device_properties(0).total_memory >> 30 if torch.cuda.is_available() else 0)
PYTHON
)
[ -n "$machine" ] || exit 2
dit_batch=192 unet_batch=48 # what fits into 80 GB
((gib < 100)) || dit_batch=256 unet_batch=64
[ -z "$smoke" ] || dit_batch=4 unet_batch=2
((gib > 0)) || no_gpu=CUDA-device graphs=()

# A part may take 20 s to end after its time.
[ -n "$total" ] || [ ${#parts[@]} -eq 0 ] || total=510
out=${given:-bench/results/$machine/$(date -u +%F)_gpu${smoke:+-smoke}} do=run
mkdir -p "$out" || exit 2
touch "$out/summary.txt"
sed -i '/^interrupted$/d' "$out/summary.txt"
scratch=$(mktemp -d) clocks=''
mkdir "$scratch/cold" "$scratch/warm" || exit 2
trap 'rm -rf "$scratch"; [ -z "$clocks" ] || kill "$clocks" 2>/dev/null' EXIT
trap interrupted INT TERM
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu,utilization.gpu,clocks_event_reasons.active \
        --format=csv,nounits -l 1 >>"$out/clocks.csv" 2>/dev/null &
    clocks=$!
fi
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
