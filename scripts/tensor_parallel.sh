#!/usr/bin/env bash
# A target over two GPUs: equal to one by the audit, and the time of a round at the 8B shape on one and on two, 70B on two.
#   bash scripts/tensor_parallel.sh      on a machine with two GPUs; MODES, where set, are the graph modes whose texts are compared (none if empty)
# Records go to $OUT/tensor_parallel where OUT is set, else to outputs/tensor_parallel.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="${PYTHONPATH:-.:kernels}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
PYTHON="${PYTHON:-python3}"
RECORDS="${OUT:-outputs}/tensor_parallel"
TWO=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 -m spec_lab target.tensor_parallel=2)
ONE=("$PYTHON" -m spec_lab)
SHAPE=(target.weights=random drafter=eagle3 drafter.weights=random prune=catchup acceptance=synthetic graph=round
  attention=triton kernels=triton workload=random_ids device=cuda "output_dir=$RECORDS")
failed=0

run() { echo "-- $*"; "$@" || failed=1; }

for mode in ${MODES-eager full_loop round}; do
  run "${TWO[@]}" drafter=eagle3 prune=catchup "graph=$mode" device=cuda dtype=float32 "name=equal" "output_dir=$RECORDS"
done
run "${ONE[@]}" target=llama3_8b "${SHAPE[@]}" name=one
run "${TWO[@]}" target=llama3_8b "${SHAPE[@]}" name=two
run "${TWO[@]}" target=llama3_70b "${SHAPE[@]}" name=two workload.num_requests=3 max_new_tokens=64 "references=[plain]" repeats=1 warmup_requests=1
"$PYTHON" -m spec_lab.report "$RECORDS"
exit "$failed"
