"""Trainings of one sweep: which of them may write to one folder."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from spec_lab.core.errors import UserError
from spec_lab.train.config import EvaluationConfig, GenerationsConfig, PackingConfig, TokenizerConfig, TrainConfig
from spec_lab.train.drafter_config import Eagle3TrainingConfig, Loss, MtpEagleTrainingConfig, NoDrafterChoice
from spec_lab.train.module_config import OptimisationConfig
from spec_lab.train.sharing import refuse_to_share
from spec_lab.train.target_config import HfTarget, PocketTrainingConfig, ShippedTarget
from spec_lab.train.texts.settings import WritingConfig

BASE = TrainConfig(drafter=MtpEagleTrainingConfig(), target=ShippedTarget(), output_dir="o")
WHOLE = replace(BASE, target=PocketTrainingConfig())
FROZEN = replace(BASE, target=HfTarget("m"))
SHORT = OptimisationConfig(num_steps=9)
CANNOT = {
    "seed": (BASE, replace(BASE, seed=3), "generations of seed=0 and of seed=3; .*'output_dir=o/${seed}'"),
    "seed of a target": (WHOLE, replace(WHOLE, seed=3), "tokenizer of seed=0 and of seed=3"),
    "texts": (
        BASE,
        replace(BASE, generations=GenerationsConfig(max_new_tokens=8)),
        "generations of generations.max_new_tokens=256 and of generations.max_new_tokens=8",
    ),
    "a nested key of a drafter": (
        BASE,
        replace(BASE, drafter=MtpEagleTrainingConfig(optimisation=SHORT)),
        "pocket-mtp_eagle of drafter.optimisation.num_steps=8000 and of drafter.optimisation.num_steps=9; "
        ".*/${drafter.optimisation.num_steps}'",
    ),
    "a key that came later": (
        replace(BASE, drafter=MtpEagleTrainingConfig(loss=Loss.tv)),
        BASE,
        "pocket-mtp_eagle of drafter.loss=tv and of drafter.loss=kl",
    ),
    "a key that came later, the other way round": (
        BASE,
        replace(BASE, drafter=MtpEagleTrainingConfig(loss=Loss.tv)),
        "pocket-mtp_eagle of drafter.loss=kl and of drafter.loss=tv",
    ),
    "a target": (
        WHOLE,
        replace(WHOLE, target=PocketTrainingConfig(num_layers=2)),
        "pocket of target.num_layers=8 and of target.num_layers=2",
    ),
    "a vocabulary": (
        WHOLE,
        replace(WHOLE, tokenizer=TokenizerConfig(vocab_size=999), drafter=NoDrafterChoice()),
        "tokenizer of tokenizer.vocab_size=4096 and of tokenizer.vocab_size=999",
    ),
    "texts of a frozen target": (
        FROZEN,
        replace(FROZEN, writing=WritingConfig(num_texts=9)),
        "texts of writing.num_texts=100000 and of writing.num_texts=9",
    ),
    "prompts of a frozen target": (
        FROZEN,
        replace(FROZEN, prompts=["a.jsonl"]),
        "texts of prompts=[] and of prompts=['a.jsonl']",
    ),
    "another frozen target": (
        FROZEN,
        replace(FROZEN, target=HfTarget("n")),
        "texts of target.path=m and of target.path",
    ),
    "a drafter of a frozen target": (
        FROZEN,
        replace(FROZEN, drafter=MtpEagleTrainingConfig(loss=Loss.tv)),
        "hf-mtp_eagle of drafter.loss=kl and of drafter.loss=tv",
    ),
    "rows of a frozen target": (
        FROZEN,
        replace(FROZEN, packing=PackingConfig(row_length=64)),
        "hf-mtp_eagle of packing.row_length=1024 and of packing.row_length=64",
    ),
    "another spelling of the folder": (BASE, replace(BASE, output_dir="./o", seed=3), "generations of seed=0"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_trainings_that_make_a_stage_in_two_ways_cannot_share_a_folder(case: str) -> None:
    first, second, reason = CANNOT[case]
    pattern = ".*".join(map(re.escape, reason.split(".*")))
    with pytest.raises(UserError, match=f"^output_dir=(./)?o would hold {pattern}"):
        refuse_to_share([first, replace(first, output_dir="another"), second])
    refuse_to_share([first, replace(second, output_dir="another")])


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (FROZEN, replace(FROZEN, drafter=Eagle3TrainingConfig(), packing=PackingConfig(kept_gigabytes=1))),
        (FROZEN, replace(FROZEN, writing=WritingConfig(batch_size=3))),
        (FROZEN, replace(FROZEN, generations=GenerationsConfig(max_new_tokens=8))),
        (BASE, BASE),
        (BASE, replace(BASE, drafter=NoDrafterChoice(), seed=3)),
        (BASE, replace(BASE, evaluation=EvaluationConfig(num_draft_tokens=2), device="cuda", num_workers=3)),
        (BASE, replace(BASE, tokenizer=TokenizerConfig(vocab_size=999))),
    ],
)
def test_trainings_that_make_alike_what_they_share_may(first: TrainConfig, other: TrainConfig) -> None:
    refuse_to_share([first, other])
