#!/usr/bin/env bash
# gpu_checks.sh FOLDER: all that a machine with GPUs can say of this checkout, in the order of what matters most if time
# runs out. A line for each step as it ends; logs and benchmark records in FOLDER.
#   PYTHON=python3     with jax for CUDA, the test extras and this checkout installed (or PYTHONPATH=.)
#   DRIVER=            an exchange_driver built already (default: built here, by cmake and nvcc)
#   STEPS="..."        which of: driver sanitize conformance kernels pending suite example throughput (default: all)
#   LIMIT=200          seconds that a step may take
set -uo pipefail
[[ $# -eq 1 ]] || { sed -n '2,8s/^# *//p' "$0" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit

python=${PYTHON:-python3}
limit=${LIMIT:-200}
driver=${DRIVER:-}
export PYTHONUNBUFFERED=1 JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu}
export XLA_PYTHON_CLIENT_PREALLOCATE=${XLA_PYTHON_CLIENT_PREALLOCATE:-false} # tests start more processes
pytest=("$python" -m pytest -q -p no:cacheprovider -o "timeout=$limit")

failed=0
# step NAME COMMAND...: its output goes to a log, of which the last line, and what failed, is shown.
step() {
  local name=$1 log=$out/$1.log start=$SECONDS code
  shift
  timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1
  code=$?
  [[ $code -eq 0 ]] || failed=1
  printf '%-12s %s, %d s: %s\n' "$name" "$([[ $code -eq 0 ]] && echo ok || echo "FAILED ($code)")" $((SECONDS - start)) \
    "$(tail -n 1 "$log" | cut -c 1-150)"
  [[ $code -eq 0 ]] || grep -E '^(FAILED|ERROR|E  )|jax_ep: group|wrong:' "$log" | cut -c 1-200 | head -n 20
}

build_driver() {
  [[ -z $driver ]] || return 0
  step build sh -c "cmake -S tests/cuda -B '$out/build' && cmake --build '$out/build'"
  driver=$out/build/exchange_driver
}

for name in ${STEPS:-driver sanitize conformance kernels pending suite example throughput}; do
  case $name in
    driver) build_driver && step driver "$driver" && step delay "$driver" --delay --seed 1 ;;
    sanitize) build_driver && OUT=$out LIMIT=$((limit / 4)) step sanitize tests/cuda/sanitize.sh "$driver" ;;
    conformance) step conformance "${pytest[@]}" --on gpu -n 4 tests/test_conformance.py -k cuda ;;
    kernels) step kernels "${pytest[@]}" -m gpu -n 3 tests/test_kernels.py tests/test_kernel_processes.py ;;
    pending) step pending "${pytest[@]}" --on gpu -n 6 tests/test_pending.py ;;
    suite)
      step suite "${pytest[@]}" --on gpu -n 6 tests/test_transforms.py tests/test_meshes.py tests/test_gradients.py \
        tests/test_moe.py tests/test_moe_options.py tests/test_native_layout.py
      ;;
    example) step example "${pytest[@]}" -m gpu tests/test_example.py tests/test_bench_throughput.py ;;
    throughput) step throughput "$python" -m jax_ep bench throughput --sms 0 64 24 --out "$out" ;;
    *) echo "gpu_checks.sh: no such step: $name" >&2; exit 2 ;;
  esac
done
exit $failed
