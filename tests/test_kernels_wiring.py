"""kernels=triton against kernels=torch: the same tokens from whole engines, and every kernel really launched.

On a CPU the kernels run in Triton's interpreter, on a GPU as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_kernels.rope_write import rope_write
from spec_lab.acceptance.phase import ThinkingMarkers
from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.build.engine import build_engine
from spec_lab.build.kernels import make_kernels
from spec_lab.build.limits import engine_limits
from spec_lab.build.models import load_models
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.plan import RopeConfig
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.config.choices import Dtype
from spec_lab.config.groups import AcceptanceConfig
from spec_lab.config.option import get
from spec_lab.config.run import RecordConfig, Run, SamplingConfig
from spec_lab.core.errors import UserError
from spec_lab.core.kernel_set import TORCH_FORMS
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.passes import Pass
from spec_lab.core.results import GenerationResult
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.models.layer_builder import build_attention
from spec_lab.models.layers import FusedRopeAndWrite, RopeThenWrite
from spec_lab.models.rope import rotary_table
from spec_lab.options.acceptance.lossless import Rejection, Strict
from spec_lab.options.acceptance.lossy import RelaxedThinking
from tests import drawn_plan  # noqa: F401  registers a plan
from tests.covering import each_value
from tests.graph_lab import live_kv
from tests.kernel_lab import DEVICE, LaunchedKernels, assert_near, randn
from tests.lab import make_config, make_pair, part, random_requests
from tests.tiny_assistant import make_tiny_assistant
from tests.tiny_mtp import make_tiny_mtp

VOCAB_SIZE, PAGE_SIZE = 24, 4
MARKERS = ThinkingMarkers(3, 4)
SAMPLED = SamplingConfig(temperature=0.8)


@dataclass(frozen=True)
class Case:
    """A composition, and the kernels it has to launch whatever the graph mode."""

    kernels: frozenset[str]
    drafter: str = "eagle3"
    acceptance: AcceptanceConfig = field(default_factory=Strict)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    draft_sampling: str = "greedy"
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "strict": Case(frozenset({"strict_accept", "rope_write"})),
    "relaxed": Case(frozenset({"draft_standing", "rope_write"}), acceptance=RelaxedThinking()),
    "one_hot": Case(
        frozenset({"rejection_sample", "rope_write"}), acceptance=Rejection(method="one_hot"), sampling=SAMPLED
    ),
    "standard": Case(
        frozenset({"rejection_sample", "sample_draft", "rope_write"}),
        acceptance=Rejection(),
        sampling=SAMPLED,
        draft_sampling="distribution",
    ),
    "truncated": Case(
        frozenset({"rejection_sample", "sample_draft", "rope_write"}),
        acceptance=Rejection(),
        sampling=SamplingConfig(temperature=0.8, top_k=9, top_p=0.9),
        draft_sampling="distribution",
    ),
    "ngram": Case(frozenset({"strict_accept", "rope_write", "look_up"}), drafter="ngram"),
    "mtp_vanilla": Case(frozenset({"strict_accept", "slide_windows", "rope_write"}), drafter="mtp_vanilla"),
    "mtp_eagle": Case(frozenset({"strict_accept", "rope_write"}), drafter="mtp_eagle"),
    "frozen_kv": Case(frozenset({"strict_accept", "rope_write"}), drafter="frozen_kv"),
    "draft_model": Case(frozenset({"strict_accept", "rope_write"}), drafter="draft_model"),
    "planned": Case(
        frozenset({"rejection_sample", "sample_draft", "rope_write", "note_confidence", "count_offered"}),
        acceptance=Rejection(),
        sampling=SAMPLED,
        draft_sampling="distribution",
        options={"plan": "drawn"},
    ),
}
GRAPHS = ("eager", "full_loop", "step_replay", "round")
CAPTURED = {
    "strict": "step_replay",
    "ngram": "full_loop",
    "mtp_vanilla": "round",
    "planned": "round",
}
"""The graph modes of the cases that a CPU captures, where the interpreter runs each launch twice more."""
CELLS = [(case, CAPTURED.get(case, "eager")) for case in CASES]
if DEVICE.type != "cpu":
    CELLS = [(case, CAPTURED.get(case, graph)) for case, graph in each_value(CASES, GRAPHS)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target without per-head norms, so that its heads fit the fused kernel, and weights for each drafter."""
    target, head = make_pair(tmp_path_factory.mktemp("pair"), "llama", vocab_size=VOCAB_SIZE)
    config = read_model_config(target)
    folders = {"target": target, "eagle3": head, "draft_model": target, "ngram": head}
    for drafter, count in (("mtp_vanilla", 3), ("mtp_eagle", 1)):
        folders[drafter] = tmp_path_factory.mktemp(drafter)
        make_tiny_mtp(folders[drafter], "deepseek_names", config, num_modules=count)
    folders["frozen_kv"] = tmp_path_factory.mktemp("frozen_kv")
    make_tiny_assistant(folders["frozen_kv"], config)
    return folders


def make_run(folders: dict[str, Path], case: Case, graph: str, kernels: str = "torch") -> Run:
    config = make_config(
        (folders["target"], folders[case.drafter]),
        case.drafter,
        num_draft_tokens=3,
        prune="catchup",
        batch_size=2,
        device=DEVICE.type,
        dtype="float32",
        kernels=kernels,
        cache={"page_size": PAGE_SIZE},
        record=RecordConfig(confidences="note_confidence" in case.kernels),
        options=case.options if case.drafter == "ngram" else {"draft_sampling": case.draft_sampling} | case.options,
    )
    graph_config = get("graph", graph)()
    return replace(config, acceptance=case.acceptance, sampling=case.sampling, graph=graph_config)


def make_engine(config: Run, requests: Sequence[Request]) -> Engine:
    chosen = config
    limits = engine_limits(chosen, list(requests))
    models = load_models(chosen, limits.max_seq_len, MARKERS)
    return build_engine(chosen, models, limits)


def thinking_requests(count: int, max_new_tokens: int) -> list[Request]:
    """Requests whose prompts end inside thinking, so that a relaxed rule relaxes."""
    requests = random_requests(count, max_new_tokens, vocab_size=VOCAB_SIZE, lengths=(1, 7))
    return [replace(request, prompt_ids=(*request.prompt_ids, MARKERS.begin)) for request in requests]


def outcome(result: GenerationResult) -> list[tuple[list[int], list[int]]]:
    return [(record.output_ids, record.accepted_per_round) for record in result.requests]


def assert_alike(folders: dict[str, Path], name: str, graph: str, requests: list[Request]) -> None:
    case = CASES[name]
    torch_engine = make_engine(make_run(folders, case, graph), requests)
    triton_engine = make_engine(make_run(folders, case, graph, "triton"), requests)
    expected = torch_engine.generate(requests)
    with LaunchedKernels() as launched:
        result = triton_engine.generate(requests)
    assert outcome(result) == outcome(expected)
    torch.testing.assert_close(live_kv(triton_engine), live_kv(torch_engine), rtol=0, atol=1e-4)
    assert [round_.relaxed for round_ in result.rounds] == [round_.relaxed for round_ in expected.rounds]
    carries = graph == "step_replay" and name not in ("draft_model", "ngram")
    assert launched.names == case.kernels | ({"update_draft_inputs"} if carries else set())
    assert sum(len(record.output_ids) for record in result.requests) >= 2 * len(requests)


@pytest.mark.parametrize(("case", "graph"), CELLS)
def test_every_case_gives_the_tokens_of_torch(folders: dict[str, Path], case: str, graph: str) -> None:
    assert_alike(folders, case, graph, thinking_requests(2, 3))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on a GPU nothing is interpreted")
def test_the_interpreters_wrong_type_is_refused_by_both_knobs() -> None:
    for make in (
        lambda: part("attention", "triton").build(Run(dtype=Dtype.bfloat16), TORCH_FORMS, 64),
        lambda: make_kernels("triton", torch.device("cpu"), torch.bfloat16),
    ):
        with pytest.raises(UserError, match="dtype=bfloat16 wrongly"):
            make()


@pytest.mark.parametrize(
    "change",
    [
        {"attention_gate": True},
        {"rope": RopeConfig(300.0, "none", partial_rotary_factor=0.5)},
        {"qk_norm": True, "float32_norms": True},
    ],
)
def test_gates_partial_rotation_and_float32_norms_are_in_it_too(
    change: dict[str, Any], folders: dict[str, Path]
) -> None:
    """Queries, keys and values are those of torch, from heads with or without gates behind them."""
    config = read_model_config(folders["target"])
    plan = replace(config.layers[0], **change)
    config = replace(config, layers=(plan,))
    tensors = {
        name: randn(*shape, seed=len(name))
        for name, shape in decoder_tensor_shapes(config).items()
        if name.startswith("model.layers.0.self_attn.")
    }
    heads = randn(3, plan.num_heads * (2 if plan.attention_gate else 1) + 2 * plan.num_kv_heads, plan.head_dim)
    rotary = rotary_table(plan.rope, plan.head_dim, 64, torch.float32, DEVICE).rows(torch.arange(3, device=DEVICE))
    outcomes = []
    for kernel in (None, rope_write):
        backend = TorchAttention(4, 64, rope_write=kernel)
        attention: Any = build_attention(plan, config.rms_norm_eps, tensors, "model.layers.0.self_attn.", backend)
        assert type(attention.rope_and_write) is (FusedRopeAndWrite if kernel else RopeThenWrite)
        cache = LayerCache(torch.zeros(16, 2, plan.num_kv_heads, plan.head_dim, device=DEVICE))
        positions, pages = torch.arange(3, device=DEVICE).unsqueeze(0), torch.tensor([[2, 3, 1]], device=DEVICE)
        metadata = backend.build(positions, torch.tensor([3], device=DEVICE), pages, 3)
        outcomes.append((attention.rope_and_write(heads, Pass(cache, metadata, rotary=rotary)), cache.kv))
    for got, expected in zip(*outcomes, strict=True):
        assert_near(got, expected)
