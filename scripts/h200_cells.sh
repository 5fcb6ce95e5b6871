#!/usr/bin/env bash
# The cells of docs/log/ that were taken last (rounds_8b, graph_modes, moe, trees), for one call of an H200 or several.
#   GPUS=0,1 LIMIT=560 bash scripts/h200_cells.sh FOLDER [JOB...]   begins nothing that would not be over LIMIT seconds from now
#   bash scripts/h200_cells.sh FOLDER --list                       the jobs, and how long they are predicted to take
#   DRY=--dry-run bash scripts/h200_cells.sh FOLDER [JOB...]       composes and checks every cell, and runs none
# Jobs run the most valuable first, each GPU taking the next that no other has. Typed again, what is done is skipped, and a job
# that failed or was cut goes on with its missing cells. One that fails, or takes three times its prediction, stops no other.
# FOLDER gets steps.txt, a log a job, and tables.txt. PART, where it is set, holds overrides of trees' cells; JOBS names a file of
# other jobs than these.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="${PYTHONPATH:-.:kernels}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4 PYTHON="${PYTHON:-python3}"
DRY="${DRY:-}"
LIMIT="${LIMIT:-1500}"
FOLDER="$1"
shift

# Chains and trees on 54 prompts, beside plain decoding in the same process; of a group of points, drafter and batch.
trees() { # seconds, drafter, batch, name of the group, points, more overrides
  echo "$1 $4-$2-$3 $PYTHON -m spec_lab experiment=trees size=full points=$5 drafter=$2 batch_size=$3 graph=round device=cuda" \
    "workload.limit=54 max_new_tokens=96 repeats=2 warmup_requests=1 output_dir=$FOLDER/trees ${6:-} ${PART:-} $DRY"
}

# A line a job: predicted seconds, name, command. Predictions are of cells of 22 November: 2 to 4 s for 27 or 54 prompts without
# a reference, the first of a process 10.
jobs() {
  local batch drafter modes="warmup_requests=1 max_new_tokens=80 graph=round,round_overlap"
  local points=chain3,depth3_rows16,depth3_rows8,depth3_rows4,depth5_rows32,chain1,chain7,chain15,chain5,depth5_rows16
  local lengths=depth3_rows4,depth3_rows8,depth5_rows8,depth5_rows16,depth5_rows32,chain15,chain1,chain3,chain5,chain7,depth3_rows16
  # Issue 14: lengths on all prompts, and two jobs of tokens a second that the first calls had not taken, or on a slow host.
  for drafter in mtp_eagle draft_model ngram; do
    echo "150 lengths-$drafter $PYTHON -m spec_lab experiment=trees size=full points=$lengths drafter=$drafter device=cuda dtype=float32" \
      "workload.limit=864 workload.ignore_eos=false batch_size=288 max_new_tokens=256 references=[] repeats=1 warmup_requests=0" \
      "graph=eager attention=torch kernels=torch output_dir=$FOLDER/lengths ${PART:-} $DRY"
  done
  trees 130 ngram 1 lookup chain3,depth3_rows16 "graph=eager repeats=1"
  trees 65 eagle3 64 trees $points
  # Issue 11: overlap where it was not run, `round` with a warm-up, and lines of the first table on the code as it is.
  echo "35 modes-16 PART='$modes batch_size=16 $DRY' bash scripts/h200_studies.sh $FOLDER graphs"
  echo "50 modes-64 PART='$modes batch_size=64 $DRY' bash scripts/h200_studies.sh $FOLDER graphs"
  echo "30 modes-1 PART='$modes batch_size=1 $DRY' bash scripts/h200_studies.sh $FOLDER graphs"
  echo "25 table-16 $PYTHON benchmarks/h200_round.py $FOLDER/table --only 'K=3, AL 2.5, batch 16, 512 in, 128 out' $DRY"
  echo "35 table-64 $PYTHON benchmarks/h200_round.py $FOLDER/table --only 'K=3, AL 2.5, batch 64, 512 in, 128 out' $DRY"
  echo "40 table-32k $PYTHON benchmarks/h200_round.py $FOLDER/table --only '32000 in' $DRY"
  for batch in 1 64; do
    echo "40 plain-$batch $PYTHON benchmarks/h200_round.py $FOLDER/table --only 'no drafter, batch $batch,' $DRY &&" \
      "$PYTHON benchmarks/h200_round.py $FOLDER/table --only 'no drafter, batch $batch,' --with graph=round_overlap $DRY"
  done
  # Issue 13.
  echo "40 glm-64 $PYTHON benchmarks/moe_round.py $FOLDER/moe --only glm4_7_flash 'batch 64' K=5 $DRY"
  # Issue 14: trees and chains of a drafter at a batch in one process, so that all of them have the same plain decoding.
  for batch in 1 64 16 4; do
    for drafter in eagle3 frozen_kv mtp_eagle draft_model; do
      [ "$drafter-$batch" = eagle3-64 ] && continue
      trees $((batch == 1 ? 100 : 65)) $drafter $batch trees $points
    done
  done
  # A lookup has no draft loop to capture.
  for batch in 64 16 4; do
    trees 60 ngram $batch lookup chain3,depth3_rows16 "graph=eager repeats=1"
  done
}

GPUS="${GPUS:-0}"
wanted=" $* "
list() {
  while read -r seconds name command; do
    [[ "$wanted" == "  " || "$wanted" == *" --list "* || "$wanted" == *" $name "* ]] && echo "$seconds $name $command"
  done < <(if [ -n "${JOBS:-}" ]; then cat "$JOBS"; else jobs; fi)
}

if [[ "$wanted" == *" --list "* ]]; then
  list | awk '{ print $1, $2; sum += $1 } END { print sum, "seconds in all" }'
  exit
fi
marks="$FOLDER/done"
[ -n "$DRY" ] && marks="$FOLDER/checked" && rm -rf "$marks"
mkdir -p "$marks" "$FOLDER/logs"
exec 9> "$FOLDER/lock"
flock -n 9 || { echo "another call fills $FOLDER" >&2; exit 2; }
rm -rf "$FOLDER/taken" # of a call that was killed
mkdir "$FOLDER/taken"

work() { # gpu
  local seconds name command began left most code
  while read -r seconds name command; do
    [ -e "$marks/$name" ] && continue
    left=$((LIMIT - SECONDS))
    [ "$left" -lt "$seconds" ] && continue
    mkdir "$FOLDER/taken/$name" 2> /dev/null || continue
    began=$SECONDS most=$((3 * seconds < left ? 3 * seconds : left))
    CUDA_VISIBLE_DEVICES="$1" timeout -k 5 "$most" bash -c "$command" > "$FOLDER/logs/$name.txt" 2>&1 < /dev/null 9>&-
    code=$?
    [ "$code" -eq 0 ] && touch "$marks/$name"
    echo "$name: rc=$code on GPU $1, began at $began, took $((SECONDS - began)) s of $seconds" | tee -a "$FOLDER/steps.txt"
  done < <(list)
}

for gpu in ${GPUS//,/ }; do work "$gpu" & done
wait
failed=0
while read -r seconds name command; do
  [ -e "$marks/$name" ] || { echo "missing: $name"; failed=1; }
done < <(list)
[ -n "$DRY" ] || {
  "$PYTHON" -m spec_lab.report "$FOLDER/lengths" --anyway
  "$PYTHON" -m spec_lab.report "$FOLDER/trees" --anyway
  "$PYTHON" -m spec_lab.report "$FOLDER/graphs" --anyway
  "$PYTHON" benchmarks/h200_round.py "$FOLDER/table" --show
  "$PYTHON" benchmarks/moe_round.py "$FOLDER/moe" --show
} > "$FOLDER/tables.txt" 2>&1
exit "$failed"
