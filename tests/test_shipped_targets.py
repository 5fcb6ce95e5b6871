"""Every factor of the lab on every shipped target of another family: it gives the tokens of plain decoding, or it is
refused in a line."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from spec_lab.app.compose import compose
from spec_lab.core.errors import UserError
from spec_lab.menu.chosen import choose
from spec_lab.menu.config import RunConfig
from spec_lab.menu.refusals.run import admit
from spec_lab.options.shipped import SHIPPED, ZOO, DrafterWeights
from spec_lab.wiring.drafting import load_drafter
from spec_lab.wiring.engine import build_engine
from spec_lab.wiring.limits import engine_limits
from spec_lab.wiring.models import load_models
from spec_lab.wiring.workloads import load_requests
from spec_lab.workloads.thinking import thinking_markers
from spec_lab.workloads.tokenizer import TargetTokenizer

TRAINED_AS = {"mtp_eagle": "nextn", "frozen_kv": "assistant"}
CHEAP = ["max_new_tokens=6", "workload.limit=2", "batch_size=2", "device=cpu", "num_threads=1"]
TARGETS = ("pocket_hybrid", "pocket_gemma", "pocket_moe")
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
    "target.tensor_parallel=2": (
        "splits no layers that keep a state",
        "needs 2 processes",
        "cannot split latent attention",
    ),
}
"""What is chosen, and for each target that it is tried on the words of its refusal, if it is refused.

`test_lossless.py` crosses on a target of plain layers what does not ask which layers there are."""
CELLS = [
    (overrides, target, refusal)
    for overrides, refused in CHOICES.items()
    for target, refusal in zip(TARGETS, refused, strict=True)
    if refusal is not None
]


def config_of(target: str, overrides: str) -> RunConfig:
    shipped = [] if overrides.startswith("drafter=") else [f"drafter={SHIPPED[target][0]}"]
    return compose([f"target={target}", *shipped, *CHEAP, *overrides.split()]).config


def decode(config: RunConfig) -> dict[str, list[int]]:
    chosen = choose(config)
    tokenizer = TargetTokenizer(chosen.target_folder)
    requests = load_requests(chosen, tokenizer)
    limits = engine_limits(chosen, requests, config.drafter.num_draft_tokens)
    models = load_models(chosen, limits.max_seq_len, thinking_markers(tokenizer, chosen.config.target))
    engine = build_engine(chosen, models, load_drafter(chosen, models.of_drafters), limits)
    return {record.request_id: record.output_ids for record in engine.generate(requests).requests}


@cache
def plain(target: str, more: str = "") -> dict[str, list[int]]:
    return decode(config_of(target, f"drafter=none{more}"))


def test_all_shipped_targets_of_other_families_are_here() -> None:
    assert tuple(target for target in SHIPPED if target != "pocket") == TARGETS


def skip_without_weights(target: str) -> None:
    """A target may be trained before its weights are shipped; runs with it are then refused in a line."""
    if not (ZOO / target).is_dir():
        pytest.skip(f"this checkout has no weights of target={target}")


@pytest.mark.parametrize("target", SHIPPED)
def test_a_shipped_target_has_its_drafters_or_is_refused(target: str) -> None:
    folders = [ZOO / target, *(ZOO / f"{target}-{drafter}" for drafter in SHIPPED[target])]
    assert len({folder.is_dir() for folder in folders}) == 1
    config = config_of(target, f"drafter={SHIPPED[target][0]}")
    if folders[0].is_dir():
        admit(config)
    else:
        with pytest.raises(UserError, match="its weights are missing"):
            admit(config)


@pytest.mark.parametrize("drafter", ["eagle3", "mtp_eagle"])
def test_a_drafter_whose_weights_a_checkout_leaves_out_is_refused(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrafterWeights, "shipped_for", lambda *_: tmp_path / "left_out")
    with pytest.raises(UserError, match=f"^drafter={drafter}: its weights are missing .*left_out"):
        admit(config_of("pocket", f"drafter={drafter}"))


@pytest.mark.parametrize(("overrides", "target", "refusal"), CELLS, ids=lambda word: word.replace(f"{ZOO}/", ""))
def test_it_runs_or_is_refused(overrides: str, target: str, refusal: str) -> None:
    """Graph modes and prunes of drafts: `test_hybrid_mtp.py`, `test_gemma4_run.py`, `test_latent_eagle3.py`."""
    skip_without_weights(target)
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
    chosen = choose(config_of("pocket", f"drafter={drafter} max_new_tokens=16"))
    requests = load_requests(chosen, TargetTokenizer(chosen.target_folder))
    limits = engine_limits(chosen, requests, chosen.config.drafter.num_draft_tokens)
    models = load_models(chosen, limits.max_seq_len)
    records = build_engine(chosen, models, load_drafter(chosen, models.of_drafters), limits).generate(requests).requests
    assert {record.request_id: record.output_ids for record in records} == plain("pocket", " max_new_tokens=16")
    accepted = [count for record in records for count in record.accepted_per_round]
    assert sum(accepted) > len(accepted) / 4, "an untrained one has next to none accepted"
