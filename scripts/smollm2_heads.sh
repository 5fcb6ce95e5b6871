#!/usr/bin/env bash
# Heads for SmolLM2-135M on one GPU: its own texts, then a head, then all of Spec-Bench beside plain decoding.
#
#   scripts/smollm2_heads.sh MODEL.gguf QUESTIONS.jsonl FOLDER texts SEED [WORDS...]
#   scripts/smollm2_heads.sh MODEL.gguf QUESTIONS.jsonl FOLDER DRAFTER K SECONDS [WORDS...]
#
# A writer of texts waits for its host, so that several, each with a SEED, fill a GPU; the training reads them as one.
# DRAFTER is eagle3, mtp_eagle, or a drafter of a whole block; SECONDS are of its training. It goes on where it was when it is
# called again. Of a folder of texts that is not whole the finished files are read. TORCHDYNAMO_DISABLE=1 trains uncompiled.
# With PROCESSES=N in the environment N GPUs train it, each with its part of a batch.
# WORDS are of the training. Those of a block's parts are of the run as well, and device=cpu is of both. With a drafter.head a
# second run leaves it out.
set -euo pipefail
model=$1 questions=$2 folder=$3 step=$4

if [ "$step" = texts ]; then
    exec python3 -m spec_lab.train.texts target=hf "target.path=$model" device=cuda num_texts=24000 second_turns=0 batch_size=768 \
        max_prompt_tokens=384 max_new_tokens=256 'temperatures=[0,0,0,0.7]' texts_per_file=3000 "seed=$5" "output_dir=$folder/texts/$5" "${@:6}"
fi
num_drafts=$5 seconds=$6 prune=none
shift 6
[[ $step = eagle3 || $step = mtp_eagle ]] && prune=catchup  # of blocks it is no captured round
parts=() runs=('')
for word in "$@"; do
    case $word in
    drafter.head=none) ;;
    drafter.head=*) runs=("${runs[0]} $word" drafter.head=none) ;;
    drafter.markov_form=*) runs[0]+=" $word" ;;
    device=* | drafter.slots=* | drafter.conv=*) parts+=("$word") ;;
    esac
done
launch=(python3)
[ "${PROCESSES:-1}" = 1 ] || launch=(python3 -m torch.distributed.run --standalone --nproc-per-node "$PROCESSES")
"${launch[@]}" -m spec_lab.train target=smollm2_135m "target.path=$model" device=cuda "drafter=$step" "texts=$folder/texts" \
    "output_dir=$folder/heads" packing.row_length=1024 packing.held_out=0.005 drafter.optimisation.batch_size=16 \
    drafter.optimisation.num_steps=20000 "drafter.optimisation.max_seconds=$seconds" "evaluation.num_draft_tokens=$num_drafts" \
    evaluation.max_new_tokens=128 evaluation.every=1000 "$@"
for head in "${runs[@]}"; do
    python3 -m spec_lab target=hf "target.path=$model" device=cuda "drafter=$step" "drafter.path=$folder/heads/smollm2_135m-$step" \
        "drafter.num_draft_tokens=$num_drafts" "prune=$prune" graph=round 'references=[plain]' repeats=1 workload=spec_bench \
        "workload.path=$questions" workload.turns=1 workload.unusable=skip max_new_tokens=128 profile_rounds=0 "output_dir=$folder/runs" \
        $head "${parts[@]}"
done
