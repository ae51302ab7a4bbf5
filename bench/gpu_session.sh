#!/bin/sh
# One GPU, four steps of at most nine minutes, each complete in itself: what odc does on it, and how fast.
#
#   bench/gpu_session.sh 1     correctness: doctor, and all tests that need a device, in groups that run at once
#   bench/gpu_session.sh 2     compute-sanitizer over the compiled kernels, where it is installed
#   bench/gpu_session.sh 3     rates of every kernel, one in CUDA C++ beside it; a GEMM beside a gather (bench/one_gpu.py)
#   bench/gpu_session.sh 4     a 0.5B model trained by odc and by FSDP2; pushes beside a busy peer; odc bench
#   bench/gpu_session.sh all   one after the other
#
# It runs out of a checkout with the torch, triton, pytest, pytest-timeout and hypothesis that PYTHON (python3) has, and
# trains where that has transformers as well; nothing is installed or downloaded. A log of each part and the figures go
# to RESULTS (runs/gpu); figures are written one by one, so a step that is cut off keeps what it measured. Every part has
# a time limit, and a part that fails or lacks what it needs stops no other.
# REHEARSE=1 runs all of it without a GPU: tests skip, kernels are interpreted, sizes are tiny.
cd "$(dirname "$0")/.." || exit 1
step=${1:?which step: 1, 2, 3, 4 or all}
results=${RESULTS:-runs/gpu}
python=${PYTHON:-python3}
mkdir -p "$results"
PYTHONPATH=$(pwd)${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
# A cache of compiled kernels in the checkout serves the next step.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$(pwd)/runs/triton}"
if [ -n "$REHEARSE" ]; then
    export CUDA_VISIBLE_DEVICES=
    on=cpu ranks=1,2 sizes=64K rest=publish cupy= one="--rehearse" train="--rehearse --steps 3"
else
    on=cuda ranks=1,2 sizes=1M,16M,64M rest=publish,add cupy=cupy one="" train="--gloo --steps 4"
fi

# part SECONDS NAME COMMAND...: run a command for so long at most; its output goes to a log, the end of it to a page.
part() {
    limit=$1 name=$2 log=$results/$2.log
    shift 2
    begun=$(date +%s)
    echo "== $name, at most $limit s: $*" >"$log"
    timeout -k 5 "$limit" "$@" >>"$log" 2>&1
    code=$?
    { echo "== $name: $*"; tail -n 15 "$log"; } | cut -c 1-300
    echo "$name: exit code $code after $(($(date +%s) - begun)) s" | tee -a "$results/summary.txt"
}

# Tests of a group run one after the other; one that hangs leaves half of the time to those after it.
tests() {
    limit=$1 name=$2
    shift 2
    part "$limit" "$name" "$python" -m pytest -v -m gpu -p no:cacheprovider --durations 10 --timeout $((limit / 2)) "$@"
}

begun_with=$(cat "$results/summary.txt" 2>/dev/null | wc -l)
case $step in
1)
    if [ -n "$REHEARSE" ]; then
        part 90 doctor "$python" -m odc.cli doctor &
    else
        part 90 doctor "$python" -m odc.cli doctor --need cuda &
    fi
    cd tests/gpu || exit 1
    results=$(cd ../.. && cd "$results" && pwd)
    tests 250 kernels ../kernels/test_gpu.py ../kernels/test_fences.py test_kernels.py &
    tests 250 memory test_heap.py test_engines.py test_atomics.py test_allocations.py \
        test_threads.py test_capture.py &
    tests 250 dropin test_dropin.py test_meshes.py test_optimizer_stream.py &
    tests 250 jobs test_recovery.py test_train.py &
    tests 250 hosts test_hosts.py -k "changes or nodes" &
    tests 250 more_hosts test_hosts.py -k "not changes and not nodes" &
    tests 250 readers test_handover.py test_handover_processes.py test_checkpoint_engine.py &
    tests 250 lanes test_lanes.py test_device_spans.py &
    tests 250 nvshmem test_nvshmem.py test_nvshmem_kernels.py &
    wait
    tests 60 driver test_driver_memory.py # alone: it counts the memory that is free
    ;;
2)
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
    if [ -n "$sanitizer" ] && [ -z "$REHEARSE" ]; then
        for tool in memcheck racecheck; do
            part 140 "$tool" "$sanitizer" --tool "$tool" --error-exitcode 9 --target-processes all \
                "$python" -m pytest -q -m gpu -p no:cacheprovider --timeout 130 tests/kernels/test_gpu.py -k "units or words"
        done
    else
        echo "sanitizer: compute-sanitizer is not installed" | tee -a "$results/summary.txt"
    fi
    ;;
3)
    [ -z "$REHEARSE" ] || export TRITON_INTERPRET=1
    for each in beside kernels $cupy; do
        # shellcheck disable=SC2086
        part 160 "one_gpu_$each" "$python" -m bench.one_gpu --only $each --results "$results" $one
    done
    ;;
4)
    if "$python" -c 'import importlib.util as util, sys; sys.exit(util.find_spec("transformers") is None)'; then
        # shellcheck disable=SC2086
        part 200 train "$python" -m bench.gpu_train --ranks 1 2 --results "$results" $train
    else
        echo "train: transformers is not installed" | tee -a "$results/summary.txt"
    fi
    [ -n "$REHEARSE" ] || part 100 decoupled "$python" -m bench.gpu_decoupled --rounds 3 --results "$results"
    for each in host push,gather $rest; do
        part 80 "bench_$each" "$python" -m odc.cli bench --quick --device $on --ranks $ranks --sizes $sizes \
            --only "$each" --json "$results/bench_${each%%,*}.json"
    done
    ;;
all)
    for each in 1 2 3 4; do
        bench/gpu_session.sh $each
    done
    ;;
*)
    echo "there is no step $step" >&2
    exit 2
    ;;
esac
failed=$(tail -n "+$((begun_with + 1))" "$results/summary.txt" | grep -v "exit code 0" | cut -d : -f 1)
[ -z "$failed" ] || { echo "failed:" $failed; exit 1; }
