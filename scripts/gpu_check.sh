#!/usr/bin/env bash
# Everything this project says about GPUs, on those that are there: tests, memory checks, machine code, timings.
#   bash scripts/gpu_check.sh            all of it
#   bash scripts/gpu_check.sh tests      one part, or some: versions, tests, sanitizer, machine_code, modes, bench
# The first four are over within ten minutes: LIMIT is there for it.
# Tests and memory checks are jobs of one file or a part of one, JOBS (8) at once on each GPU: what compares bits does not
# mind company, and a kernel that corrupts a device takes no other file's results with it. Either part ends after LIMIT
# (250) seconds: a job that has not run by then has failed.
# What is printed goes to $OUT/gpu_check.txt too, and what a job prints to $OUT/gpu_check/, where OUT is set, else in /tmp.
# A part that fails does not keep the others from running.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="${PYTHONPATH:-.:kernels}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
export PYTHON="${PYTHON:-python3}" LIMIT="${LIMIT:-250}" LOGS="${OUT:-/tmp}/gpu_check"
failed=0

versions() {
  "$PYTHON" - <<'PY'
import platform, torch, triton
gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
print(gpus, "python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__)
PY
  date -u +%F
}

gpus() {
  if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then echo "${CUDA_VISIBLE_DEVICES//,/ }"
  else nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd' '; fi
}

# Files of tests that run on a GPU where there is one, on a CPU and a GPU, and on a GPU alone.
kernel_files() { grep -l "^from tests.kernel_lab" tests/test_*.py; }
mode_files() { grep -lE "^    (lab|DEVICES),$|^from tests.graph_lab import .*\b(lab|DEVICES)\b" tests/test_*.py; }
marked_files() { grep -lF "pytest.mark.gpu" tests/test_*.py; }

# Prints a job for each file of stdin: a line of a name, from $1, and of what pytest is asked for besides the file.
a_job_each() {
  local file name
  while read -r file; do
    name=${file#tests/test_}
    echo "$1${name%.py} $2 $file"
  done
}

# The files that take longest come first, in parts of about the same length.
test_jobs() {
  local every="-m 'slow or not slow'" some="rules_and_sampled or every_drafter"
  echo "graph_modes_1 $every -k 'cuda and ($some)' tests/test_graph_modes.py"
  echo "graph_modes_2 $every -k 'cuda and not ($some)' tests/test_graph_modes.py"
  mode_files | grep -v test_graph_modes | a_job_each "" "$every -k cuda"
  kernel_files | sort -r | a_job_each "" "$every"
  marked_files | grep -vxFf <(kernel_files; mode_files) | a_job_each "" "-m gpu"
}

# Every kernel by itself, under each tool; not those that whole engines launch, nor torch's attention beside ours, of which
# racecheck warns. Outcomes so far: docs/log/kernels.md.
sanitizer_jobs() {
  local tool
  for tool in racecheck memcheck; do
    kernel_files | grep -E "test_(kernels|triton|four|narrow)_" | grep -vE "wiring|stops|triton_(backend|hybrid|products)" | sort -r \
      | a_job_each "${tool}_" "$tool -k 'not engine'"
  done
}

pytest_job() { eval "\"\$PYTHON\" -m pytest -q -p no:cacheprovider --tb=short $1"; }

sanitizer_job() {
  eval "compute-sanitizer --tool ${1%% *} --error-exitcode 9 --print-limit 5 --kernel-name-exclude kernel_substring=fmha_cutlass \
    \"\$PYTHON\" -m pytest -q -p no:cacheprovider --tb=short --maxfail 3 ${1#* }"
}

what_failed() { grep -hE "^(FAILED|ERROR)|^========= +(Error|Invalid|Race)|^ +and .* access" "$1" | sort -u | head -12 | sed 's/^/\n   /'; }

# Runs the job of a line on the GPU whose turn it is, and says how it ended.
run_job() {
  local kind=$1 name=${2%% *} asked=${2#* } status=124 begun=$SECONDS left=$((END - $(date +%s))) all log
  read -ra all <<< "$GPUS"
  log="$LOGS/$name.txt"
  : > "$log"
  if [ "$left" -gt 0 ]; then
    CUDA_VISIBLE_DEVICES=${all[SLOT % ${#all[@]}]} timeout -k 3 "$left" bash -c "$kind"' "$1"' _ "$asked" > "$log" 2>&1
    status=$?
  fi
  [ "$status" != 124 ] || echo "out of time" >> "$log"
  printf '%s\n' "$name rc=$status $((SECONDS - begun)) s: $(grep -E "[0-9]+ (passed|failed|error|skipped)|SUMMARY|out of time" "$log" \
    | tail -3 | sed 's/^=* *//; s/ *=*$//' | paste -sd'|')$([ "$status" = 0 ] || what_failed "$log")"
  return $((status > 0))
}
export -f run_job pytest_job sanitizer_job what_failed

# Runs the jobs of stdin, JOBS at once on each GPU, and names those that failed.
run_jobs() {
  mkdir -p "$LOGS"
  GPUS=$(gpus); END=$(($(date +%s) + LIMIT)); export GPUS END
  xargs -d '\n' -n 1 -P $((${JOBS:-8} * $(wc -w <<< "$GPUS"))) --process-slot-var=SLOT bash -c 'run_job '"$1"' "$1"' _ \
    | tee "$LOGS/jobs.txt"
  local status=${PIPESTATUS[0]}
  [ "$status" = 0 ] || echo "failed: $(sed -nE 's/ rc=[1-9].*//p' "$LOGS/jobs.txt" | paste -sd' ')"
  return "$status"
}

tests() { test_jobs | run_jobs pytest_job; }

sanitizer() {
  command -v compute-sanitizer > /dev/null || { echo "compute-sanitizer is not installed: not run"; return 0; }
  sanitizer_jobs | run_jobs sanitizer_job
}

machine_code() { "$PYTHON" -m tests.machine_code; }

modes() {
  "$PYTHON" -m spec_lab experiment=graph_modes device=cuda dtype=float32 workload.limit=32 repeats=3 "output_dir=${OUT:-/tmp}/graph_modes"
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
  for part in ${*:-versions tests sanitizer machine_code modes bench}; do
    echo "== $part"
    "$part" || { echo "== $part FAILED"; failed=1; }
    echo "== after $SECONDS s"
  done
  return "$failed"
}

main "$@" 2>&1 | tee "${OUT:-/tmp}/gpu_check.txt"
exit "${PIPESTATUS[0]}"
