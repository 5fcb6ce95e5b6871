#!/usr/bin/env bash
# Drafters of whole blocks on one GPU: every preset beside EAGLE-3, for the pocket target.
#
#   scripts/block_heads.sh pocket  PRESET FOLDER SECONDS [WORDS...]
#   scripts/block_heads.sh run     PRESET FOLDER K [WORDS...]
#
# PRESET is dflash, dspark, dflash2, domino, lilicorr, p_eagle or eagle3. `pocket` trains on texts that all presets of a
# FOLDER share: the first one writes them, the others wait. Several can run side by side, a process each. `run` decodes
# with what `pocket` trained.
# SECONDS are of a training with its decodings in between, not of the texts. Called again, it goes on where it was.
# WORDS are further settings, such as device=cpu debug=smoke. TORCHDYNAMO_DISABLE=1 trains eagle3 uncompiled.
set -euo pipefail
task=$1 preset=$2 folder=$3 limit=$4
shift 4
by_the_clock=("drafter=$preset" "drafter.optimisation.max_seconds=$limit" drafter.optimisation.num_steps=20000 evaluation.num_draft_tokens=7)

case $task in
pocket)
    [ "$preset" = eagle3 ] && by_the_clock+=(drafter.num_unrolled_steps=7)
    [ "$preset" = dspark ] && by_the_clock+=(drafter.block_size=7)
    exec python3 -m spec_lab.train target=shipped device=cuda "output_dir=$folder/pocket" "${by_the_clock[@]}" \
        drafter.optimisation.checkpoint_every=1000 drafter.optimisation.log_every=250 evaluation.limit_per_category=32 "$@"
    ;;
run)
    exec python3 -m spec_lab device=cuda "drafter=$preset" "drafter.path=$folder/pocket/pocket-$preset" \
        "drafter.num_draft_tokens=$limit" graph=round 'references=[plain]' repeats=3 profile_rounds=0 "output_dir=$folder/runs" "$@"
    ;;
*)
    echo "pocket or run, not $task" >&2
    exit 2
    ;;
esac
