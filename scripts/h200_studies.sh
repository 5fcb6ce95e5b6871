#!/usr/bin/env bash
# Where each technique pays, at the shape of Llama-3.1-8B with random weights and imposed acceptance, on one H200.
#   bash scripts/h200_studies.sh FOLDER STUDY...    studies: pruning, prompts, graphs, drafts, contexts
# Each but pruning and prompts is an experiment of the lab with a real shape's options; typed again they go on where they were
# stopped. FOLDER gets a folder and a file of tables a study; PART, where it is set, holds overrides that share a study out over
# several GPUs (PART="batch_size=1,8"), and for pruning and prompts options (PART="--chunks 512").
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="${PYTHONPATH:-.:kernels}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
PYTHON="${PYTHON:-python3}"
FOLDER="$1"
shift
read -ra PARTS <<< "${PART:-}"
SHAPE=(target=llama3_8b target.weights=random device=cuda attention=triton kernels=triton workload=random_ids
  workload.limit=null workload.prompt_tokens=512 "workload.num_requests=\${batch_size}" repeats=1 profile_rounds=0)
HEAD=(drafter.weights=random drafter.draft_vocab_size=32000 acceptance=synthetic acceptance.mean_length=1.5)

lab() { echo "-- $*"; "$PYTHON" -m spec_lab "$@" "${PARTS[@]}"; }

# Rounds and their catch-up step, unpruned and pruned, behind 1k and 8k tokens. Prompts are not computed, since 64 of 8k tokens take
# 14 s in every cell.
pruning() {
  "$PYTHON" benchmarks/round_costs.py "$FOLDER/pruning" --prompts 1024,8192 --batches 1,8,64,256 --drafts 0,1,3,7 \
    target=llama3_8b target.weights=random drafter.draft_vocab_size=32000 device=cuda attention=triton kernels=triton "${PARTS[@]}"
}

# What outputs for the last prompt row alone save, in time, logits and memory: no drafter, an EAGLE-3 head, an MTP module;
# short chunks and long. No runs of the lab, since these record no memory.
prompts() {
  "$PYTHON" benchmarks/prompt_outputs.py "$FOLDER/prompts" --tokens 1024,8192,32768,130000 --chunks 512,8192 \
    target=llama3_8b target.weights=random device=cuda "${PARTS[@]}"
}

# The graph modes, each with its launches, replays and idle time.
graphs() {
  lab experiment=graph_modes "${SHAPE[@]}" "${HEAD[@]}" "output_dir=$FOLDER/graphs" profile_rounds=20 \
    batch_size=1,16,64 max_new_tokens=96
}

# A round by the number of drafts, and the acceptance length at which it breaks even with plain decoding.
drafts() {
  lab experiment=batch_scaling "${SHAPE[@]}" "${HEAD[@]}" "output_dir=$FOLDER/drafts" graph=round max_new_tokens=96 \
    drafter.num_draft_tokens=1,2,3,4,5,6,7 batch_size=1,16,64
}

# A round by the keys it attends to.
contexts() {
  lab experiment=batch_scaling "${SHAPE[@]}" "${HEAD[@]}" "output_dir=$FOLDER/contexts" graph=round max_new_tokens=96 \
    drafter.num_draft_tokens=3 batch_size=1 workload.prompt_tokens=1024,8192,32768,65536,120000
}

table() {
  case "$1" in
    prompts) "$PYTHON" benchmarks/prompt_outputs.py "$FOLDER/prompts" --show ;;
    pruning) "$PYTHON" benchmarks/round_costs.py "$FOLDER/pruning" --show ;;
    *) "$PYTHON" -m spec_lab.report "$FOLDER/$1" --anyway ;;
  esac
}

mkdir -p "$FOLDER"
failed=0
for study in "$@"; do
  "$study" || failed=1
  [[ " ${PARTS[*]} " == *" --dry-run "* ]] && continue
  table "$study" > "$FOLDER/$study.txt" || failed=1
done
exit "$failed"
