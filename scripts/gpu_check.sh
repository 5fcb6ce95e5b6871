#!/usr/bin/env bash
# Everything this project says about GPUs, on one: tests, memory checks, timings. Under ten minutes on an H200.
#   bash scripts/gpu_check.sh            all of it
#   bash scripts/gpu_check.sh tests      one part: versions, tests, sanitizer, bench
# What is printed goes to $OUT/gpu_check.txt too, where OUT is set. A part that fails does not keep the others from running.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="${PYTHONPATH:-.:kernels}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
PYTHON="${PYTHON:-python3}"
KERNEL_TESTS=$(ls tests/test_triton_*.py tests/test_kernels_*.py | grep -v compile)
failed=0

versions() {
  "$PYTHON" - <<'PY'
import platform, torch, triton
print(torch.cuda.get_device_name(), "python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__)
PY
  date -u +%F
}

tests() {
  # One process each: a kernel that corrupts the device must not take the others' results with it.
  "$PYTHON" -m pytest -q -p no:cacheprovider tests/test_capture_gpu.py
  local status=$?
  "$PYTHON" -m pytest -q -p no:cacheprovider tests/test_graph_modes.py -k cuda; status=$((status + $?))
  # shellcheck disable=SC2086
  "$PYTHON" -m pytest -q -p no:cacheprovider -m "slow or not slow" $KERNEL_TESTS; status=$((status + $?))
  "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu --ignore tests/test_capture_gpu.py --ignore tests/test_graph_modes.py tests
  return $((status + $?))
}

sanitizer() {
  command -v compute-sanitizer > /dev/null || { echo "compute-sanitizer is not installed: not run"; return 0; }
  local status=0 tool
  for tool in memcheck racecheck; do
    # shellcheck disable=SC2086
    timeout 100 compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 \
      "$PYTHON" -m pytest -q -p no:cacheprovider -x -k "sanitized" $KERNEL_TESTS 2>&1 | tail -12
    status=$((status + $?))
  done
  return "$status"
}

bench() {
  local file status=0
  for file in kernels/bench/*.py; do
    echo "-- $file"
    "$PYTHON" "$file"; status=$((status + $?))
  done
  return "$status"
}

main() {
  local part
  for part in ${*:-versions tests sanitizer bench}; do
    echo "== $part"
    "$part" || { echo "== $part FAILED"; failed=1; }
  done
  return "$failed"
}

main "$@" 2>&1 | tee "${OUT:-/tmp}/gpu_check.txt"
exit "${PIPESTATUS[0]}"
