"""Experts of 4 bits: Triton's product against torch's, what is read of a checkpoint, and whole targets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spec_kernels.four_bits_reference import widen_reference
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.keep_narrow import INT4, MXFP4, SCALES_SUFFIX, NarrowForm, problem_of_narrow
from spec_lab.checkpoints.target_tensors import target_tensors
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.config.choices import KernelsChoice, WeightDtype
from spec_lab.measure.runner import weights_in_words
from spec_lab.models import target_loader
from spec_lab.models.experts import ExpertProduct, SortedExperts
from spec_lab.models.linear import gelu_tanh
from spec_lab.models.routers import Routing
from spec_lab.models.target_loader import WeightSource
from spec_lab.operators import triton_experts
from spec_lab.operators.triton_experts import TritonExperts
from tests.kernel_lab import DEVICE, DTYPES, LaunchedKernels, assert_near, randn
from tests.lab import generate, make_config, part, random_requests
from tests.test_four_bits import FORMS, in_groups
from tests.tiny_checkpoints import make_tiny_eagle3, refused, rewrite_tensors
from tests.tiny_experts import make_tiny_experts
from tests.tiny_gpt_oss import by_formula, make_tiny_gpt_oss, pack_experts

HIDDEN, INNER, EXPERTS, CHOSEN = 168, 72, 12, 3
CPU = torch.device("cpu")


def products(form: str, size: int, dtype: torch.dtype, biased: bool = False, device: torch.device = DEVICE) -> Any:
    """Gates and ups, and downs. No size is a multiple of a block of inputs or of a tile."""
    for seed, (height, width) in enumerate(((2 * INNER, HIDDEN), (HIDDEN, INNER))):
        weight = randn(EXPERTS * height, width, seed=seed, dtype=dtype) / width**0.5
        parts = (part.unflatten(0, (EXPERTS, height)) for part in in_groups(FORMS[form], weight, size))
        bias = randn(EXPERTS, height, seed=9, dtype=dtype).to(device) if biased else None
        yield ExpertProduct(*(part.to(device) for part in parts), bias)


def routing(num_rows: int, device: torch.device = DEVICE) -> Routing:
    """Rows choose among 11 experts, half of them expert 2; nobody chooses expert 0."""
    generator = torch.Generator().manual_seed(num_rows)
    ids = torch.stack([1 + torch.randperm(EXPERTS - 1, generator=generator)[:CHOSEN] for _ in range(num_rows)])
    ids[::2, 0] = torch.where((ids[::2] == 2).any(1), ids[::2, 0], 2)
    return Routing(ids.to(device), torch.rand(num_rows, CHOSEN, generator=generator).to(device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "size"), [("int4", 128), ("int4", 32), ("mxfp4", 32)])
@pytest.mark.parametrize(("num_rows", "limit"), [(1, 0.7), (16, None), (64, 0.7)])
def test_triton_gives_what_torch_gives(
    dtype: torch.dtype, form: str, size: int, num_rows: int, limit: float | None
) -> None:
    rows, given = randn(num_rows, HIDDEN, seed=5, dtype=dtype), (form, size, dtype, limit is not None)
    with LaunchedKernels() as launched:
        got = TritonExperts(*products(*given), gelu_tanh, limit)(rows, routing(num_rows))
    assert launched.names == {"routed_experts"}, "nothing is widened in memory"
    torch_form = SortedExperts(*products(*given, CPU), gelu_tanh, limit)
    assert_near(got, torch_form(rows.float().cpu(), routing(num_rows, CPU)).to(DEVICE, dtype))


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_prompt_are_multiplied_by_widened_weights(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_experts, "MOST_NARROW_PAIRS", 16)
    rows, kept = randn(80, HIDDEN, dtype=torch.float16), [*products(form, 32, torch.float16)]
    with LaunchedKernels() as launched:
        got = TritonExperts(*kept, gelu_tanh)(rows, routing(80))
    assert launched.count["widen"] == 2
    wide = (ExpertProduct(each.widened_by(widen_reference, torch.float16)) for each in kept)
    assert torch.equal(got, TritonExperts(*wide, gelu_tanh)(rows, routing(80)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_rows_beside_it(form: str, dtype: torch.dtype) -> None:
    """And an expert that nobody chose is not read."""
    rows, chosen, kept = randn(16, HIDDEN, dtype=dtype), routing(16), [*products(form, 32, dtype)]
    experts = TritonExperts(*kept, gelu_tanh)
    together = experts(rows, chosen)
    for each in kept:
        each.scales[: each.shape[1]] = 255 if form == "mxfp4" else float("nan")
    for some in ([0], [3, 4, 5, 6], [15, 2], list(range(16))):
        alone = experts(rows[some], Routing(chosen.expert_ids[some], chosen.weights[some]))
        assert torch.equal(alone, together[some]), some


@pytest.fixture
def kept_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU widens narrow weights when it reads them; here they stay, as on a GPU."""
    monkeypatch.setattr(target_loader, "with_wide_products", lambda tensors, form, dtype: tensors)


def read(folder: Path, form: NarrowForm | None) -> dict[str, torch.Tensor]:
    config = read_model_config(folder)
    source = WeightSource(folder, torch.float32, CPU, kept_in=form)
    return dict(source.read(decoder_tensor_shapes(config), lambda stored: target_tensors(stored, config)))


def test_a_checkpoint_in_mxfp4_keeps_its_own_codes_and_exponents(tmp_path: Path, kept_narrow: None) -> None:
    """And the numbers that it has in 16 bits: the target is the one that is read without the knob."""
    pack_experts(tmp_path, make_tiny_gpt_oss(tmp_path))
    stored, tensors, auto = load_file(tmp_path / "model.safetensors"), read(tmp_path, MXFP4), read(tmp_path, None)
    narrow = {name.removesuffix(SCALES_SUFFIX) for name in tensors if name.endswith(SCALES_SUFFIX)}
    assert narrow == {name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")} and len(narrow) == 8
    for name in narrow:
        blocks, exponents = (stored[f"{name}_{kind}"] for kind in ("blocks", "scales"))
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2)
        rows = torch.arange(codes.shape[1])
        order = torch.cat((rows[::2], rows[1::2])) if name.endswith("gate_up_proj") else rows
        assert torch.equal(tensors[name], codes[:, order])
        assert torch.equal(tensors[f"{name}{SCALES_SUFFIX}"], exponents[:, order])
        kept = ExpertProduct.of(tensors, name)
        assert kept.expert_bytes == codes.shape[1] * (64 + 4), "one block of codes and its exponents"
        assert torch.equal(kept.widened_by(widen_reference, torch.float32), by_formula(blocks, exponents)[:, order])
    assert all(torch.equal(auto[name], tensors[name]) for name in set(auto) - narrow)
    assert weights_in_words(WeightDtype.mxfp4, "bfloat16", ["mxfp4"]) == "mxfp4, as stored"
    rewrite_tensors(tmp_path, {f"{name}_scales": torch.full_like(exponents, 192)})
    with refused(f"{name}_scales has values of 4e+19", "which no trained model has"):
        read(tmp_path, MXFP4)


def test_an_mxfp4_checkpoint_is_rounded_anew_to_int4(tmp_path: Path) -> None:
    pack_experts(tmp_path, make_tiny_gpt_oss(tmp_path))
    auto, got = read(tmp_path, None), read(tmp_path, INT4)
    name = "model.layers.1.mlp.experts.down_proj"
    for expert, weight in enumerate(auto[name]):
        assert torch.equal(got[name][expert], INT4.widened(*INT4.narrowed(weight), torch.float32))
    assert not torch.equal(
        auto["model.layers.1.self_attn.q_proj.weight"], got["model.layers.1.self_attn.q_proj.weight"]
    )


def make_target(folder: Path, kind: str) -> None:
    if kind != "gpt_oss":
        make_tiny_experts(folder, kind, moe_intermediate_size=32)
    else:
        pack_experts(folder, make_tiny_gpt_oss(folder))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU experts run in 16 bits, whose near ties part")
@pytest.mark.parametrize(
    ("kind", "form"),
    [("gpt_oss", "auto"), ("gpt_oss", "mxfp4"), ("gpt_oss", "int4"), ("qwen3_moe", "int4"), ("glm4_moe", "mxfp4")],
)
def test_triton_gives_the_tokens_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, form: str
) -> None:
    """Of weights that are widened when they are read, with drafts and without. GLM-4.5 has shared experts. `auto` runs
    gpt-oss in `dtype`, with a tree too: sinks in the kernels for few rows, for prompts and for trees."""
    target, head = tmp_path / "target", tmp_path / "head"
    make_target(target, kind)
    make_tiny_eagle3(head, read_model_config(target), window=6)
    requests = random_requests(2, max_new_tokens=3, lengths=(9, 20))
    tree, chain = part("tree", "dynamic", topk=2, depth=3, num_rows=6), part("tree", "none")
    cases = [("none", chain), ("eagle3", chain), ("eagle3", tree)]
    for drafter, tree in cases[: 3 if form == "auto" else 2]:
        run = make_config((target, head), drafter, prune="catchup", batch_size=2, dtype="float32", tree=tree)
        run = replace(run, target=replace(run.target, weight_dtype=WeightDtype(form)))
        expected = generate(run, requests)
        fused: Any = replace(run, attention=part("attention", "triton"), kernels=KernelsChoice.triton)
        with monkeypatch.context() as patched, LaunchedKernels() as launched:
            patched.setattr(target_loader, "with_wide_products", lambda tensors, form, dtype: tensors)
            assert generate(fused, requests) == expected
        assert launched.count["routed_experts"] > 0 and launched.count["few_experts"] == 0


def test_what_keeps_no_experts_says_so(tmp_path: Path) -> None:
    make_tiny_experts(tmp_path, "qwen3_moe")
    config = read_model_config(tmp_path)
    problems = {name: problem_of_narrow(config, form) for name, form in target_loader.KEPT_IN.items()}
    assert problems["int4"] is problems["mxfp4"] is None
    assert problems["fp8"] == problems["bfloat16"] == "layers of experts"
