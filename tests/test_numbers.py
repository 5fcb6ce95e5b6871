"""A run whose logits are no numbers never ends as one that emits plain decoding's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spec_lab.app.compose import Composed
from spec_lab.app.run import run
from spec_lab.checkpoints import checkpoint
from spec_lab.config.run import Run, SamplingConfig
from spec_lab.core.errors import UserError
from spec_lab.measure.lab import load_lab
from tests.lab import make_config
from tests.tiny_checkpoints import rewrite_tensors
from tests.tiny_runs import CHEAP, make_run_config, make_runnable_pair, write_prompts

GROUPS = ("target", "drafter", "acceptance", "prune", "graph", "attention", "workload", "sampling", "logger")
LETTERS = [chr(33 + index) for index in range(0, 150, 3)]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return make_runnable_pair(tmp_path, num_hidden_layers=8)


@pytest.fixture(autouse=True)
def large_weights_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what no trained model has get as far as the arithmetic."""
    monkeypatch.setattr(checkpoint, "LARGEST_WEIGHT", torch.finfo(torch.float32).max)


def overflow(pair: tuple[Path, Path], threshold: float | None = None) -> None:
    """Finite weights of the target whose logit of token 7 is infinite: everywhere, or where a channel is past
    `threshold`, which is 1 or more."""
    head = load_file(pair[0] / "model.safetensors")["lm_head.weight"]
    largest = torch.finfo(torch.float32).max
    head[7] = largest if threshold is None else 0
    head[7, 0] = largest / (threshold or 1)
    rewrite_tensors(pair[0], {"lm_head.weight": head})


def run_of(pair: tuple[Path, Path], letters: list[str], **changes: Any) -> Run:
    prompts = write_prompts(pair[0].parent / "mine.jsonl", [{"prompt": letter} for letter in letters])
    return make_run_config(pair, prompts, **changes)


@pytest.mark.parametrize("references", [["plain"], []])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_target_that_overflows_at_once_is_refused_before_anything_is_recorded(
    pair: tuple[Path, Path], references: list[str], sampled: bool
) -> None:
    overflow(pair)
    config = run_of(pair, ["abc"], references=references)
    if sampled:
        config.sampling = SamplingConfig(temperature=1.0)
    with pytest.raises(
        UserError, match=r"^target: its logits become NaN or infinite in dtype=float32 \(at position \d"
    ):
        load_lab(config)


def first_clean(pair: tuple[Path, Path]) -> str:
    """A prompt whose own logits are finite."""
    for letter in LETTERS:
        try:
            load_lab(run_of(pair, [letter]))
        except UserError:
            continue
        return letter
    raise AssertionError("the target overflows everywhere")


def test_a_run_that_overflows_later_ends_in_a_line(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overflow(pair, threshold=1.5)
    config = run_of(pair, [first_clean(pair), *LETTERS[:8]], references=["plain"])
    capsys.readouterr()
    with pytest.raises(UserError, match="target: its logits become NaN or infinite"):
        run(Composed(config, {}), tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "refused" and "logits become NaN or infinite" in summary["reason"]


@pytest.mark.parametrize("drafter", ["ngram", "random"])
def test_imposed_acceptance_of_drafts_that_are_end_tokens_goes_on(pair: tuple[Path, Path], drafter: str) -> None:
    """Prompt lookup's filler, 0, is an end token of the target here, as it is of the shipped one; so are most ids."""
    from spec_lab.measure.lab import MAIN
    from spec_lab.options.acceptance.imposed import Synthetic

    ends = [0, *range(20, 160)]
    (pair[0] / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    config = make_config(pair, drafter, **CHEAP)
    config.workload = run_of(pair, LETTERS[:6]).workload
    config.acceptance = Synthetic(mean_length=4.0)
    lab = load_lab(config)
    ended_inside = 0
    for record in lab.engines[MAIN].generate(lab.requests).requests:
        ids, lengths = record.output_ids, record.emitted_per_round
        if len(ids) == 1:  # ended by the target's own first token
            continue
        last_of_rounds = [sum(lengths[: index + 1]) for index in range(len(lengths))]
        ends_at = [index for index, token in enumerate(ids) if token in ends]
        ended_inside += sum(index not in last_of_rounds for index in ends_at)
        if record.finish_reason.name == "EOS":
            assert len(ids) - 1 == last_of_rounds[-1]
    assert ended_inside > 0, "no imposed draft was an end token: the test shows nothing"
