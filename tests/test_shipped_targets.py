"""Every factor of the lab on every shipped target of another family: it gives the tokens of plain decoding, or it is
refused in a line."""

from __future__ import annotations

from functools import cache

import pytest

from spec_lab.app.compose import compose
from spec_lab.build.auto import with_auto_chosen
from spec_lab.build.engine import build_engine
from spec_lab.build.limits import engine_limits
from spec_lab.build.models import load_models
from spec_lab.checkpoints.packaged import ZOO
from spec_lab.config.checks import admit
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError
from spec_lab.workloads.thinking import thinking_markers
from spec_lab.workloads.tokenizer import TargetTokenizer

SHIPPED = {"pocket_hybrid": "mtp_eagle", "pocket_gemma": "frozen_kv", "pocket_moe": "mtp_eagle"}
"""The shipped targets of other families, and the drafter that is shipped for each."""
CHEAP = ["max_new_tokens=6", "workload.limit=2", "batch_size=2", "device=cpu", "num_threads=1"]
TARGETS = tuple(SHIPPED)
CHOICES: dict[str, tuple[str | None, str | None, str | None]] = {
    "drafter=eagle3 drafter.weights=random": ("", "", "too shallow"),
    "drafter=mtp_eagle": (None, "no weights", None),
    "drafter=mtp_vanilla": (None, None, "no weights"),
    "drafter=frozen_kv": ("no weights", None, None),
    "tree=static": ("keep a state", "", None),
    "tree=dynamic": (None, None, ""),
    "prune=prefill": ("", None, None),
    "recurrent.rollback=replay": ("", None, None),
    "dtype=bfloat16": ("", None, None),
    "target.weight_dtype=fp8": ("keep a state", "Gemma 4", "latent attention"),
}
"""What is chosen, and for each target that it is tried on the words of its refusal, if it is refused.

`test_lossless.py` crosses on a target of plain layers what does not ask which layers there are."""
CELLS = [
    (overrides, target, refusal)
    for overrides, refused in CHOICES.items()
    for target, refusal in zip(TARGETS, refused, strict=True)
    if refusal is not None
]


def config_of(target: str, overrides: str) -> Run:
    shipped = [] if overrides.startswith("drafter=") else [f"drafter={SHIPPED[target]}"]
    return with_auto_chosen(compose([f"target={target}", *shipped, *CHEAP, *overrides.split()]).config)


def decode(config: Run) -> dict[str, list[int]]:
    tokenizer = TargetTokenizer(config.target.folder)
    requests = list(config.workload.load(config, tokenizer))
    limits = engine_limits(config, requests)
    models = load_models(config, limits.max_seq_len, thinking_markers(tokenizer, config.target))
    engine = build_engine(config, models, limits)
    return {record.request_id: record.output_ids for record in engine.generate(requests).requests}


@cache
def plain(target: str, more: str = "") -> dict[str, list[int]]:
    return decode(config_of(target, f"drafter=none{more}"))


@pytest.mark.parametrize(("overrides", "target", "refusal"), CELLS, ids=lambda word: word.replace(f"{ZOO}/", ""))
def test_it_runs_or_is_refused(overrides: str, target: str, refusal: str) -> None:
    """Graph modes and prunes of drafts: `test_hybrid_mtp.py`, `test_gemma4_run.py`, `test_latent_eagle3.py`."""
    if not (ZOO / target).is_dir():  # a target may be trained before its weights are shipped
        pytest.skip(f"this checkout has no weights of target={target}")
    config = config_of(target, overrides)
    if refusal:
        with pytest.raises(UserError) as refused:
            admit(config)
            decode(config)
        assert refusal in str(refused.value)
        assert "\n" not in str(refused.value)
        return
    admit(config)
    outputs = decode(config)
    assert all(len(tokens) == 6 for tokens in outputs.values())
    if not overrides.startswith("dtype="):
        assert outputs == plain(target)


@pytest.mark.parametrize("drafter", ["dflash", "dspark", "dflash2", "domino", "lilicorr", "p_eagle"])
def test_shipped_drafters_of_a_whole_block_leave_plain_tokens_and_draft_well(drafter: str) -> None:
    chosen = config_of("pocket", f"drafter={drafter} max_new_tokens=16")
    requests = list(chosen.workload.load(chosen, TargetTokenizer(chosen.target.folder)))
    limits = engine_limits(chosen, requests)
    models = load_models(chosen, limits.max_seq_len)
    records = build_engine(chosen, models, limits).generate(requests).requests
    assert {record.request_id: record.output_ids for record in records} == plain("pocket", " max_new_tokens=16")
    accepted = [count for record in records for count in record.accepted_per_round]
    assert sum(accepted) > len(accepted) / 4, "an untrained one has next to none accepted"
