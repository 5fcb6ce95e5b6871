#!/usr/bin/env bash
# Heads for SmolLM2-135M on one GPU: its own texts, then a head, then all of Spec-Bench beside plain decoding.
#
#   scripts/smollm2_heads.sh MODEL.gguf QUESTIONS.jsonl FOLDER texts SEED [WORDS...]
#   scripts/smollm2_heads.sh MODEL.gguf QUESTIONS.jsonl FOLDER DRAFTER K SECONDS [WORDS...]
#
# A writer of texts waits for its host, so that several, each with a SEED, fill a GPU; the training reads all of them.
# DRAFTER is eagle3, mtp_eagle, or a drafter of a whole block; SECONDS are of its training. It goes on where it was when it is
# called again. With PROCESSES=N in the environment N GPUs train it. WORDS are of the texts' runs, or of the training.
set -euo pipefail
model=$1 questions=$2 folder=$3 step=$4
target=(target=hf "target.path=$model" device=cuda)
quick=('references=[]' repeats=1 warmup_requests=0 profile_rounds=0 record.audit=false drafter=none batch_size=768 graph=round
    graph.rounds_per_replay=16 cache.max_seq_len=640 max_new_tokens=256 workload.unusable=skip)

if [ "$step" = texts ]; then
    prompts="$folder/prompts/$5"
    python3 -m spec_lab "${target[@]}" "${quick[@]}" workload=user_turns workload.num_requests=24000 sampling.temperature=1 \
        acceptance=rejection acceptance.method=one_hot "seed=$5" "output_dir=$prompts"
    exec python3 -m spec_lab "${target[@]}" "${quick[@]}" workload=outputs "workload.path=$(echo "$prompts"/*)" name=texts \
        "seed=$5" "output_dir=$folder/texts" "${@:6}"
fi
num_drafts=$5 seconds=$6 prune=none
shift 6
[[ $step = eagle3 || $step = mtp_eagle ]] && prune=catchup  # of blocks it is no captured round
launch=(python3)
[ "${PROCESSES:-1}" = 1 ] || launch=(python3 -m torch.distributed.run --standalone --nproc-per-node "$PROCESSES")
"${launch[@]}" -m spec_lab.train "${target[@]}" "drafter=$step" "data=$folder/texts/*" "hydra.run.dir=$folder/heads/$step" \
    held_out_share=0.005 optimisation.num_steps=20000 "optimisation.max_seconds=$seconds" evaluation.every=1000 \
    "evaluation.num_draft_tokens=$num_drafts" evaluation.max_new_tokens=128 "$@"
python3 -m spec_lab "${target[@]}" "drafter=$step" "drafter.path=$folder/heads/$step" "drafter.num_draft_tokens=$num_drafts" \
    "prune=$prune" graph=round 'references=[plain]' repeats=1 workload=spec_bench "workload.path=$questions" workload.turns=1 \
    workload.unusable=skip max_new_tokens=128 profile_rounds=0 "output_dir=$folder/runs"
