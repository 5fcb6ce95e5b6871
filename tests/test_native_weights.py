"""target.weight_dtype=bfloat16: a target that kernels=native keeps in 16 bits and computes in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import spec_lab
from spec_kernels.native import build
from spec_kernels.native import parts as native_parts
from spec_kernels.native.packing import Layout, pack
from spec_lab.measure.lab import load_lab
from tests.lab import make_pair
from tests.native_lane import assert_alike
from tests.tiny_checkpoints import rewrite_tensors

pytestmark = pytest.mark.skipif(build.problem() is not None, reason="needs a C compiler")
Pair = tuple[Path, Path]


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return make_pair(tmp_path, "llama", tie_word_embeddings=request.param)


def composed(pair: Pair, *overrides: str) -> spec_lab.Composed:
    target, head = pair
    return spec_lab.compose(
        [
            *("device=cpu", "target=hf", f"target.path={target}", f"drafter.path={head}", "prune=catchup", "repeats=1"),
            *("workload=random_ids", "workload.num_requests=3", "workload.prompt_tokens=24"),
            *("max_new_tokens=16", "batch_size=2", "warmup_requests=0", "profile_rounds=0", *overrides),
        ]
    )


def target_of(pair: Pair, *overrides: str) -> Any:
    return load_lab(composed(pair, *overrides).config).models.target


def round_matrices(folder: Path) -> None:
    """Round a checkpoint's matrices to bfloat16, in place."""
    stored = load_file(folder / "model.safetensors")
    rounded = {name: tensor.bfloat16().float() for name, tensor in stored.items() if tensor.ndim == 2}
    assert not any(torch.equal(tensor, stored[name]) for name, tensor in rounded.items())
    rewrite_tensors(folder, rounded)


def test_it_is_the_target_of_rounded_matrices_to_the_bit(pair: Pair) -> None:
    """Norms stay as they are; without C the same weights give the same up to how float32 is summed."""
    narrow, wide = target_of(pair, "target.weight_dtype=bfloat16"), target_of(pair)
    round_matrices(pair[0])
    rounded, in_torch = target_of(pair), target_of(pair, "kernels=torch")
    hidden = torch.randn(5, narrow.embedding.shape[1])
    assert torch.equal(narrow.logits(hidden), rounded.logits(hidden))
    assert not torch.equal(narrow.logits(hidden), wide.logits(hidden))
    assert torch.equal(narrow.embedding, rounded.embedding)
    assert torch.equal(narrow.final_norm_weight, wide.final_norm_weight)
    assert_alike(in_torch.logits(hidden), narrow.logits(hidden))


def test_every_product_and_the_head_is_kept_in_16_bits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the target, which is made first."""
    layouts: list[Layout] = []

    def noted(weight: torch.Tensor, has_tiles: bool) -> tuple[torch.Tensor, Layout]:
        panels, layout = pack(weight, has_tiles)
        layouts.append(layout)
        return panels, layout

    monkeypatch.setattr(native_parts, "pack", noted)
    for weight_dtype, is_narrow in (("bfloat16", True), ("auto", False)):
        layouts.clear()
        num_layers = len(target_of(pair, f"target.weight_dtype={weight_dtype}").layers)
        assert {layout is not Layout.FLOATS for layout in layouts[: 4 * num_layers + 1]} == {is_narrow}


def test_drafting_has_the_tokens_of_plain_decoding_and_of_rounded_matrices(pair: Pair, tmp_path: Path) -> None:
    narrow = spec_lab.run(
        composed(pair, "target.weight_dtype=bfloat16", f"output_dir={tmp_path}", "references=[plain]")
    )
    assert narrow.run.target.weights == "bfloat16, rounded when read from float32"
    assert narrow.run["equal_to_plain"] == 1 and narrow.run.row_invariant
    assert narrow.run["divergence.bugs"] == 0
    round_matrices(pair[0])
    rounded = spec_lab.run(composed(pair, f"output_dir={tmp_path}", "references=[]"))
    for one, other in zip(narrow.requests, rounded.requests, strict=True):
        assert one.output_ids == other.output_ids
