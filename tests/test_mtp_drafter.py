"""drafter=mtp_eagle through the engine against the chain recomputed by transformers' layers, without any cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spec_lab.checkpoints.families import read_model_config
from spec_lab.core.types import NormSide, Request
from tests.covering import each_value
from tests.lab import PRUNING, Reference, make_config, make_engine
from tests.scripted_rule import ScriptedRule, compare_drafts
from tests.tiny_checkpoints import make_tiny_target, refused, rewrite_config, rewrite_tensors
from tests.tiny_mtp import FAMILIES, SlowMtp, TinyMtp, make_tiny_mtp

PRE, POST = NormSide.PRE_NORM, NormSide.POST_NORM


def run_against_slow_chain(
    target: tuple[Path, Reference],
    folder: Path | None,
    module: TinyMtp,
    prune: str = "catchup",
    num_draft_tokens: int = 3,
    bucket: int = 1,
    slow_sides: tuple[NormSide, NormSide] = (POST, POST),
    **options: Any,
) -> ScriptedRule:
    """`folder` of the module, None where it lies in the target's; `slow_sides` what goes in, and what is recycled."""
    slow, pair = SlowMtp(module, target[1], *slow_sides), (target[0], target[0])
    options = {"path": None if folder is None else str(folder), **options}
    return compare_drafts(slow, pair, "mtp_eagle", num_draft_tokens, prune, bucket=bucket, options=options)


CASES = [
    *(("ours", prune) for prune in PRUNING),
    *each_value((family for family in FAMILIES if family != "ours"), ("none", "catchup")),
]


@pytest.mark.parametrize(("family", "prune"), CASES)
def test_drafts_equal_the_whole_chain_recomputed(
    target: tuple[Path, Reference], tmp_path: Path, family: str, prune: str
) -> None:
    """They are compared after prompts of one token and of several chunks, and after rounds of every n."""
    (module,) = make_tiny_mtp(tmp_path, family, read_model_config(target[0]))
    rule = run_against_slow_chain(target, tmp_path, module, prune)
    assert set(rule.accepted) == {0, 1, 2, 3} and rule.compared > 40


@pytest.mark.parametrize(("target_hidden", "recycled_hidden"), [(PRE, POST), (POST, PRE)])
def test_either_side_of_either_norm(
    target: tuple[Path, Reference], tmp_path: Path, target_hidden: NormSide, recycled_hidden: NormSide
) -> None:
    (module,) = make_tiny_mtp(tmp_path, "ours", read_model_config(target[0]))
    sides = {"target_hidden": str(target_hidden), "recycled_hidden": str(recycled_hidden)}
    rule = run_against_slow_chain(target, tmp_path, module, slow_sides=(target_hidden, recycled_hidden), **sides)
    assert rule.compared > 40


@pytest.mark.parametrize(
    ("side", "prune", "normed"), [(PRE, "prefill", [0, 1]), (POST, "prefill", [5, 2]), (PRE, "none", [5, 2])]
)
def test_the_final_norm_runs_over_the_rows_that_are_read(
    target: tuple[Path, Reference], tmp_path: Path, side: NormSide, prune: str, normed: list[int]
) -> None:
    """A prompt of 7 tokens in chunks of 5 and 2. The module reads the features of all rows; logits, of the last one."""
    make_tiny_mtp(tmp_path, "ours", read_model_config(target[0]))
    request = Request("seven", "x", (5, 6, 7, 8, 9, 10, 11), 4, ignore_eos=True)
    options = {"path": str(tmp_path), "target_hidden": str(side)}
    config = make_config((target[0], target[0]), "mtp_eagle", 3, prune, cache={"prefill_chunk": 5}, options=options)
    engine = make_engine(config, [request])
    outputs = []
    forward = engine.parts.target.forward
    engine.parts.target.forward = lambda *inputs: outputs.append(forward(*inputs)) or outputs[-1]
    (record,) = engine.generate([request]).requests
    assert [output.hidden.shape[0] for output in outputs[:2]] == normed
    assert [output.features.shape[0] for output in outputs[:2]] == [5, 2]
    assert record.output_ids == target[1].greedy(request)


@pytest.mark.parametrize("num_draft_tokens", [1, 8])
def test_other_numbers_of_drafts_with_padded_rows(
    target: tuple[Path, Reference], tmp_path: Path, num_draft_tokens: int
) -> None:
    (module,) = make_tiny_mtp(tmp_path, "ours", read_model_config(target[0]))
    bucket = (1, 4)[num_draft_tokens % 2]
    rule = run_against_slow_chain(target, tmp_path, module, num_draft_tokens=num_draft_tokens, bucket=bucket)
    assert len(set(rule.accepted)) > num_draft_tokens // 2


def make_tiny_mimo(folder: Path) -> tuple[tuple[Path, Reference], TinyMtp]:
    """Write MiMo-7B in small: a Qwen2-style target and its module in one folder; transformers reads it as Qwen2."""
    make_tiny_target(folder, "qwen2", attention_bias=True)
    reference = Reference(folder)
    (module,) = make_tiny_mtp(folder, "mimo", read_model_config(folder))
    rewrite_config(folder, model_type="mimo")
    return (folder, reference), module


def test_mimo_brings_its_module_in_the_targets_folder(tmp_path: Path) -> None:
    """With drafter.path=null the target is loaded past the module's tensors."""
    mimo, module = make_tiny_mimo(tmp_path)
    assert read_model_config(tmp_path).family == "qwen2"
    rule = run_against_slow_chain(mimo, None, module)
    assert set(rule.accepted) == {0, 1, 2, 3} and rule.compared > 40


def test_a_module_under_deepseek_names_beside_the_trunk(tmp_path: Path) -> None:
    """A ninth layer is the module's where it has an eh_proj, and a tensor too many where it has none."""
    make_tiny_target(tmp_path, "qwen3")
    reference = Reference(tmp_path)
    (module,) = make_tiny_mtp(tmp_path, "ours", read_model_config(tmp_path))
    assert run_against_slow_chain((tmp_path, reference), None, module).compared > 40
    rewrite_tensors(tmp_path, {}, drop=("model.layers.8.eh_proj.weight",))
    with refused(tmp_path, "not expected: model.layers.8."):
        run_against_slow_chain((tmp_path, reference), None, module)
