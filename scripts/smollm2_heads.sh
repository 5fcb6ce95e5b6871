#!/usr/bin/env bash
# Heads for SmolLM2-135M on one GPU: its own texts, then eagle3 and mtp_eagle, then Spec-Bench.
#
#   scripts/smollm2_heads.sh MODEL.gguf QUESTIONS.jsonl FOLDER texts|eagle3|mtp_eagle
#
# Reckoned for an H200: 8 minutes of texts (20 M tokens), 9 minutes a head. It goes on where it was when it is called again.
# Of a folder of texts that is not whole the finished files are read. TORCHDYNAMO_DISABLE=1 trains uncompiled.
set -euo pipefail
model=$1 questions=$2 folder=$3 step=$4
target=(target=smollm2_135m "target.path=$model" device=cuda)

case $step in
texts)
    python3 -m spec_lab.train.texts target=hf "target.path=$model" device=cuda num_texts=130000 batch_size=256 \
        max_prompt_tokens=384 max_new_tokens=256 'temperatures=[0,0,0.7,1.0]' texts_per_file=16384 "output_dir=$folder/texts"
    ;;
eagle3 | mtp_eagle)
    layouts=()
    [ "$step" = eagle3 ] && layouts=('layouts=[speculators]')
    python3 -m spec_lab.train "${target[@]}" "drafter=$step" "texts=$folder/texts" "output_dir=$folder/heads" "${layouts[@]}" \
        packing.row_length=1024 packing.held_out=0.005 drafter.optimisation.batch_size=16 drafter.optimisation.max_seconds=330 \
        evaluation.num_draft_tokens=3 evaluation.max_new_tokens=128 evaluation.every=500 "evaluation.prompts=[$questions]"
    python3 -m spec_lab target=hf "target.path=$model" device=cuda "drafter=$step" \
        "drafter.path=$folder/heads/smollm2_135m-$step" drafter.num_draft_tokens=3 prune=catchup graph=round 'references=[plain]' \
        repeats=3 workload=spec_bench "workload.path=$questions" workload.turns=1 workload.limit=26 workload.unusable=skip \
        max_new_tokens=128 profile_rounds=0 "output_dir=$folder/runs"
    ;;
*)
    echo "texts, eagle3 or mtp_eagle, not $step" >&2
    exit 2
    ;;
esac
