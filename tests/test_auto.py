"""attention=auto, kernels=auto and graph=auto: what is taken where, and that nothing else sees an auto."""

from __future__ import annotations

import os

import pytest
import torch

from spec_kernels.native import build
from spec_lab.app.compose import compose
from spec_lab.build.auto import with_auto_chosen
from spec_lab.config.checks import problems
from spec_lab.config.run import Run
from spec_lab.measure.lab import default_num_threads

SAMPLED = ["acceptance=rejection", "sampling.temperature=0.7", "drafter.draft_sampling=distribution"]


def chosen(*overrides: str) -> Run:
    """The run that the lab makes of a composed one. A GPU is not asked whether it is there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        return with_auto_chosen(compose(overrides).config)


def taken(*overrides: str) -> tuple[str, str, str]:
    """Attention, kernels and graph of a run that composes without a refusal."""
    config = chosen(*overrides)
    assert list(problems(config)) == []
    return config.attention.name, str(config.kernels), config.graph.name


@pytest.fixture(autouse=True)
def what_is_fast_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("spec_lab.build.auto.find_spec", lambda name: object())
    monkeypatch.setattr(build, "problem", lambda: None)


@pytest.mark.parametrize(
    ("overrides", "kernels"),
    [
        ([], "native"),
        (["num_threads=2"], "native"),
        (["target=llama3_8b", "target.weights=random", "drafter=none", "workload=random_ids"], "native"),
        (["drafter=frozen_kv", "tree=dynamic"], "torch"),
        (["target=pocket_gemma"], "torch"),
        (["target=pocket_moe"], "torch"),
        (["target=pocket_hybrid"], "torch"),
        (["dtype=bfloat16"], "torch"),
        (["graph=round"], "native"),
    ],
)
def test_a_cpu_has_the_kernels_in_c_where_they_fit(overrides: list[str], kernels: str) -> None:
    config = chosen("device=cpu", *overrides)
    assert (config.attention.name, str(config.kernels)) == ("torch", kernels)


def test_a_cpu_without_a_compiler_has_the_reference_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "problem", lambda: "there is no C compiler")
    assert taken("device=cpu") == ("torch", "torch", "eager")


def test_registers_for_which_the_library_is_faster_with_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "register_file", lambda: "other")
    for batch_size, kernels in ((8, "native"), (9, "torch")):
        config = chosen("device=cpu", "drafter.num_draft_tokens=3", f"batch_size={batch_size}")
        assert str(config.kernels) == kernels


def test_kernels_in_c_have_one_thread_and_others_what_the_target_or_the_machine_has() -> None:
    shape = ["target=llama3_8b", "target.weights=random", "drafter=none", "workload=random_ids", "device=cpu"]
    threads = [default_num_threads(compose([*shape, f"kernels={name}"]).config) for name in ("native", "torch")]
    assert threads == [1, os.cpu_count()]
    assert default_num_threads(compose(["device=cpu", "kernels=torch"]).config) == 1


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ("triton", "triton", "round")),
        (["drafter=none"], ("triton", "triton", "round")),
        (["drafter=ngram"], ("triton", "triton", "round")),
        (["drafter=frozen_kv", "tree=dynamic"], ("triton", "triton", "round")),
        ([*SAMPLED, "acceptance.method=block"], ("triton", "torch", "round")),
        ([*SAMPLED, "acceptance.method=standard"], ("triton", "triton", "round")),
        (["drafter.plan=cost"], ("triton", "triton", "round")),
        (["record.topk=16"], ("triton", "triton", "eager")),
        (["attention=torch"], ("torch", "triton", "round")),
        (["kernels=torch"], ("triton", "torch", "round")),
        (["graph=eager"], ("triton", "triton", "eager")),
        (["graph=full_loop", "attention=auto", "kernels=auto"], ("triton", "triton", "full_loop")),
        (["drafter=dflash", "drafter.weights=random", "prune=catchup"], ("triton", "triton", "round")),
    ],
)
def test_a_gpu_has_what_is_fast_and_not_refused(overrides: list[str], expected: tuple[str, str, str]) -> None:
    assert taken("device=cuda", *overrides) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["device=cpu", "kernels=torch"], 2048),
        (["device=cpu", "kernels=native"], 1),
        (["device=cuda"], 8192),
        (["device=cuda", "batch_size=5"], 8192),
        (["device=cuda", "kernels=torch"], 8192),
        (["device=cuda", "cache.prefill_tokens=64"], 64),
    ],
)
def test_how_many_prompt_rows_share_a_forward(overrides: list[str], expected: int) -> None:
    assert chosen(*overrides).cache.prefill_tokens == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["device=cpu"], 512),
        (["device=cuda"], 8192),
        (["device=cuda", "attention=torch"], 512),
        (["device=cuda", "acceptance=relaxed_thinking", "acceptance.phase=round"], 512),
        (["device=cuda", "cache.prefill_chunk=64"], 64),
    ],
)
def test_how_many_rows_a_chunk_has(overrides: list[str], expected: int) -> None:
    """Masks of attention=torch are as large as a chunk times the keys it sees."""
    assert chosen(*overrides).cache.chunk_size == expected


@pytest.mark.parametrize("missing", ["triton", "interpreter"])
def test_without_triton_the_graph_alone_is_taken(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "triton":
        monkeypatch.setattr("spec_lab.build.auto.find_spec", lambda name: None)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert taken("device=cuda") == ("torch", "torch", "round")


@pytest.mark.parametrize(
    ("overrides", "captured"),
    [
        (["device=cuda"], True),
        (["device=cuda", "graph=round", "graph.prompts=false"], False),
        (["device=cuda", "drafter=draft_model"], False),  # chains whose prompts a graph cannot hold
        (["device=cuda", "target=pocket_hybrid", "drafter=mtp_eagle"], False),  # it keeps states
        (["device=cpu", "graph=round"], False),
        (["device=cpu", "graph=round", "graph.prompts=true"], True),
    ],
)
def test_prompts_are_captured_where_they_can_be_on_a_gpu(overrides: list[str], captured: bool) -> None:
    config = chosen(*overrides)
    assert config.graph.name == "round" and config.graph.prompts is captured  # type: ignore[attr-defined]
    assert list(problems(config)) == []
