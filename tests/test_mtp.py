"""MTP modules of every family against transformers' layers: loaded under exact names, run over a paged cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.build.caches import cache_row
from spec_lab.checkpoints import mtp_layouts
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_decoder, read_model_config
from spec_lab.checkpoints.mtp_checkpoint import load_mtp, num_mtp_modules
from spec_lab.checkpoints.mtp_layouts import MtpLayout
from spec_lab.checkpoints.packaged import ZOO
from spec_lab.core.kept import Kept
from spec_lab.core.kv_cache import NULL_PAGE, PagedKVCache
from spec_lab.core.passes import Pass
from spec_lab.core.pruning import Drop
from spec_lab.core.types import AttentionMetadata, NormSide
from spec_lab.engine.pages import PageTable
from spec_lab.models.linear import make_linear
from spec_lab.models.mtp import MtpModule
from spec_lab.models.rope import rotary_table
from tests.tiny_checkpoints import TINY_SIZES, refused, rewrite_config, rewrite_tensors
from tests.tiny_mtp import FAMILIES, TinyMtp, make_tiny_mtp

TARGET = read_decoder(TINY_SIZES | {"model_type": "qwen3", "head_dim": 16}, "target")
NUM_ROWS, PAGE_SIZE = 4, 4
STARTS, LIVE = [9, 2, 0], [0, 3, 2]
EMBEDDING = torch.randn(160, 32, generator=torch.Generator().manual_seed(1))
HEAD = torch.randn(160, 32, generator=torch.Generator().manual_seed(2)) / 32**0.5


@dataclass
class Lane:
    """A loaded module with a cache for three requests, all NaN where nothing was written."""

    module: MtpModule
    backend: TorchAttention
    cache: PagedKVCache
    table: PageTable

    def run(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, starts: list[int], first_slot: int, kept: Kept
    ) -> torch.Tensor:
        """Run rows [batch, num_queries] at `starts`, of the slots from `first_slot` on."""
        attention = self.metadata(token_ids.shape[1], starts, first_slot)
        return self.module.forward(
            token_ids.flatten(), hidden.flatten(0, 1), Pass(self.cache.layers[0], attention, kept)
        )

    def metadata(self, num_queries: int, starts: list[int], first_slot: int = 0) -> AttentionMetadata:
        first = torch.tensor(starts)
        positions = first.unsqueeze(1) + torch.arange(num_queries)
        pages = self.table.pages[first_slot : first_slot + len(starts)]
        return self.backend.build(positions, first + num_queries, pages, max(starts) + num_queries)

    def live_attention(self) -> AttentionMetadata:
        return self.metadata(1, [start + live for start, live in zip(STARTS, LIVE, strict=True)])


def make_lane(folder: Path, **sides: NormSide) -> Lane:
    config, (tensors,) = load_mtp(folder, TARGET, 1, torch.float32, "cpu")
    config = replace(config, **sides)
    backend, device = TorchAttention(PAGE_SIZE, 64), torch.device("cpu")
    plan = config.layer.only_layer
    rotary = rotary_table(plan.rope, plan.head_dim, 64, torch.float32, "cpu")
    table = PageTable(3, 16, PAGE_SIZE, device)
    for slot in range(3):
        table.assign(slot, list(range(2 + slot, 14, 3)))
    cache = PagedKVCache([cache_row(plan)], 14, PAGE_SIZE, torch.float32, device)
    cache.kv[:, (NULL_PAGE + 1) * PAGE_SIZE :] = float("nan")
    return Lane(MtpModule(config, tensors, EMBEDDING, make_linear(HEAD), rotary, backend), backend, cache, table)


@dataclass
class Rows:
    """The rows of prompts of ragged lengths, and of a window of N rows after each: token_ids [13], hidden [13, 32] by
    request.
    """

    token_ids: torch.Tensor
    hidden: torch.Tensor

    @classmethod
    def random(cls) -> Rows:
        generator = torch.Generator().manual_seed(4)
        token_ids = torch.randint(160, (3, 13), generator=generator)
        return cls(token_ids, 1 + 2 * torch.randn(3, 13, 32, generator=generator))

    def expected(self, module: TinyMtp) -> torch.Tensor:
        """The output [3, N, 32] of the windows' rows before the final norm."""
        ends = [start + NUM_ROWS for start in STARTS]
        outs = [
            module(EMBEDDING[self.token_ids[i, :end]], self.hidden[i, :end])[-NUM_ROWS:] for i, end in enumerate(ends)
        ]
        return torch.stack(outs)

    def run(self, lane: Lane, kept: Kept) -> torch.Tensor:
        """Run each prompt by itself, for its KV only; then all windows in one forward."""
        for slot, start in enumerate(STARTS):
            if start:
                prompt = self.token_ids[slot : slot + 1, :start], self.hidden[slot : slot + 1, :start]
                assert lane.run(*prompt, [0], slot, Kept(Drop.EVERYTHING)).shape == (0, 32)
        window = torch.tensor(STARTS).unsqueeze(1) + torch.arange(NUM_ROWS)
        hidden = self.hidden.gather(1, window.unsqueeze(2).expand(-1, -1, 32))
        return lane.run(self.token_ids.gather(1, window), hidden, STARTS, 0, kept)


LIVE_ROWS = torch.tensor([NUM_ROWS * i + live for i, live in enumerate(LIVE)])
SELECTIONS: dict[str, Callable[[Lane], Kept]] = {
    "all_rows": lambda lane: Kept(Drop.AFTER_LAYER, LIVE_ROWS),
    "after_attention": lambda lane: Kept(Drop.AFTER_ATTENTION, LIVE_ROWS),
    "before_attention": lambda lane: Kept(Drop.BEFORE_ATTENTION, LIVE_ROWS, lane.live_attention()),
}


@torch.inference_mode()
def distance(folder: Path, reference: TinyMtp, kept: str = "all_rows", **sides: NormSide) -> float:
    """How far the live rows' recycled output and logits are from those of transformers' layers at most."""
    lane, rows = make_lane(folder, **sides), Rows.random()
    out = rows.run(lane, SELECTIONS[kept](lane))
    assert out.shape == (3, 32)
    expected = rows.expected(reference).flatten(0, 1)[LIVE_ROWS]
    normed = reference.final_norm(expected)
    recycled = expected if lane.module.config.recycled_hidden is NormSide.PRE_NORM else normed
    logits = lane.module.draft_logits(out)
    assert torch.equal(lane.module.target_logits(out), logits)
    assert torch.equal(lane.module.greedy(out), logits.argmax(-1))
    return max(float((out - recycled).abs().max()), float((logits - normed @ HEAD.T).abs().max()))


@pytest.mark.parametrize("recycled", NormSide)
@pytest.mark.parametrize("kept", SELECTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_module_equals_transformers_layers(tmp_path: Path, family: str, kept: str, recycled: NormSide) -> None:
    """Ragged windows over the cache, for every family and whatever drops the dead rows."""
    (reference,) = make_tiny_mtp(tmp_path, family, TARGET)
    assert distance(tmp_path, reference, kept, recycled_hidden=recycled) < 2e-5


WRONG: dict[str, tuple[str, Callable[[MtpLayout], MtpLayout]]] = {
    "concat_of_ours": ("ours", lambda layout: replace(layout, hidden_first=True)),
    "concat_of_mimo": ("mimo", lambda layout: replace(layout, hidden_first=False)),
    "norms_not_folded": ("qwen3_5", lambda layout: replace(layout, zero_centred=False)),
    "norms_folded_for_nothing": ("ours", lambda layout: replace(layout, zero_centred=True)),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_layout_would_be_noticed(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, change = WRONG[case]
    (reference,) = make_tiny_mtp(tmp_path, family, TARGET)
    monkeypatch.setattr(mtp_layouts, "LAYOUTS", tuple(map(change, mtp_layouts.LAYOUTS)))
    assert distance(tmp_path, reference) > 0.05


def test_every_family_feeds_and_recycles_normed_hidden_states(tmp_path: Path) -> None:
    for family in FAMILIES:
        make_tiny_mtp(tmp_path / family, family, TARGET)
        config, _ = load_mtp(tmp_path / family, TARGET, 1, torch.float32, "cpu")
        assert (config.target_hidden, config.recycled_hidden) == (NormSide.POST_NORM, NormSide.POST_NORM), family
        assert config.num_modules == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_several_modules_come_in_order(tmp_path: Path, family: str) -> None:
    """Qwen's modules share their norms and projection. A part of them can be asked for."""
    references = make_tiny_mtp(tmp_path, family, TARGET, num_modules=3)
    config, tensors = load_mtp(tmp_path, TARGET, 2, torch.float32, "cpu")
    assert config.num_modules == 3 and len(tensors) == 2
    for reference, loaded in zip(references, tensors, strict=False):
        assert torch.equal(loaded["mlp.up_proj.weight"], reference.layer.mlp.up_proj.weight)
    assert not torch.equal(tensors[0]["mlp.up_proj.weight"], tensors[1]["mlp.up_proj.weight"])
    with refused(tmp_path, "has 3 MTP modules, and 4 are needed"):
        load_mtp(tmp_path, TARGET, 4, torch.float32, "cpu")


def test_copies_of_the_embedding_and_the_head_are_skipped(tmp_path: Path) -> None:
    (reference,) = make_tiny_mtp(tmp_path, "deepseek_names", TARGET)
    copies = {f"model.layers.8.{name}.weight": torch.zeros(160, 32) for name in ("embed_tokens", "shared_head.head")}
    rewrite_tensors(tmp_path, copies)
    assert distance(tmp_path, reference) < 2e-5


def test_a_trunk_is_not_looked_at(tmp_path: Path) -> None:
    (reference,) = make_tiny_mtp(tmp_path, "qwen3_5", TARGET)
    rewrite_tensors(tmp_path, {"model.layers.7.linear_attn.A_log": torch.zeros(3, dtype=torch.int8)})
    assert distance(tmp_path, reference) < 2e-5


def test_a_null_of_the_config_keeps_its_meaning() -> None:
    """`q_lora_rank` is null where queries have one product."""
    config, _ = load_mtp(ZOO / "pocket_moe-mtp_eagle", read_model_config(ZOO / "pocket_moe"), 1, torch.float32, "cpu")
    latent = config.layer.only_layer.latent
    assert latent is not None and latent.q_lora_rank is None


def test_zero_centred_norms_are_not_rounded(tmp_path: Path) -> None:
    (reference,) = make_tiny_mtp(tmp_path, "qwen3_5", TARGET)
    _, (tensors,) = load_mtp(tmp_path, TARGET, 1, torch.bfloat16, "cpu")
    folded = tensors["self_attn.k_norm.weight"]
    assert folded.dtype == torch.float32 and tensors["self_attn.k_proj.weight"].dtype == torch.bfloat16
    assert torch.equal(folded, 1 + reference.layer.self_attn.k_norm.weight)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({}, 0),
        ({"num_nextn_predict_layers": 0}, 0),
        ({"num_nextn_predict_layers": 3}, 3),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, 1),
    ],
)
def test_how_many_modules_a_config_names(config: dict[str, Any], count: int) -> None:
    assert num_mtp_modules(config) == count


def load(folder: Path, target: ModelConfig = TARGET) -> None:
    load_mtp(folder, target, 1, torch.float32, "cpu")


def test_refuses_linear_attention_by_name(tmp_path: Path) -> None:
    name = "model.layers.8.linear_attn.A_log"
    make_tiny_mtp(tmp_path, "deepseek_names", TARGET)
    rewrite_tensors(tmp_path, {name: torch.zeros(4, 4)})
    with refused(tmp_path, "not expected", name):
        load(tmp_path)


def test_latent_attention_by_its_tensors_and_not_by_its_name(tmp_path: Path) -> None:
    """DeepSeek's class may stand over a grouped-query module, as in `deepseek_names`, and another over a latent one."""
    (reference,) = make_tiny_mtp(tmp_path, "deepseek", TARGET)
    rewrite_config(tmp_path, architectures=["GlmMoeDsaForCausalLM"])
    assert distance(tmp_path, reference) < 2e-5
    make_tiny_mtp(tmp_path / "other", "deepseek_names", TARGET)
    config, _ = load_mtp(tmp_path / "other", TARGET, 1, torch.float32, "cpu")
    assert config.layer.only_layer.latent is None


@pytest.mark.parametrize(
    "name", ["mlp.experts.0.gate_proj.weight", "mlp.gate.weight", "mlp.shared_experts.up_proj.weight"]
)
def test_refuses_experts_of_which_the_config_says_nothing(tmp_path: Path, name: str) -> None:
    make_tiny_mtp(tmp_path, "ours", TARGET)
    rewrite_tensors(tmp_path, {f"model.layers.8.{name}": torch.zeros(4, 4)})
    with refused(tmp_path, f"model.layers.8.{name}"):
        load(tmp_path)


def test_refuses_modules_of_another_target(tmp_path: Path) -> None:
    make_tiny_mtp(tmp_path, "ours", TARGET)
    with refused(tmp_path / "config.json", "hidden_size is 32, the target has 48", "drafter.path"):
        load(tmp_path, replace(TARGET, hidden_size=48))
    with refused(tmp_path / "config.json", "vocab_size is 160, the target has 200", "drafter.path"):
        load(tmp_path, replace(TARGET, vocab_size=200))


def test_refuses_a_folder_without_modules(tmp_path: Path) -> None:
    make_tiny_mtp(tmp_path, "ours", TARGET)
    rewrite_config(tmp_path, num_hidden_layers=7)
    with refused(tmp_path, "has 0 MTP modules", "drafter.path"):
        load(tmp_path)


def test_refuses_fewer_modules_than_the_config_names(tmp_path: Path) -> None:
    make_tiny_mtp(tmp_path, "mimo", TARGET)
    rewrite_config(tmp_path, num_nextn_predict_layers=2)
    with refused(tmp_path, "missing: model.mtp_layers.1.token_layernorm.weight"):
        load(tmp_path)


def test_refuses_quantized_and_sliding_ones(tmp_path: Path) -> None:
    make_tiny_mtp(tmp_path, "mimo", TARGET)
    rewrite_config(tmp_path, use_sliding_window=True)
    with refused(tmp_path / "config.json", "use_sliding_window"):
        load(tmp_path)
    rewrite_config(tmp_path, use_sliding_window=False)
    rewrite_tensors(tmp_path, {"model.mtp_layers.0.input_proj.weight": torch.ones(32, 64, dtype=torch.int8)})
    with refused(tmp_path, "quantized", "input_proj.weight is I8"):
        load(tmp_path)


def test_the_config_on_the_hub_may_leave_keys_out(tmp_path: Path) -> None:
    """MiMo-7B's has no layer_types, and rope_theta at the top level. Qwen3.5 turns a quarter of the channels by
    default.
    """
    make_tiny_mtp(tmp_path, "qwen3_5", TARGET, rope_parameters={"rope_type": "default", "rope_theta": 1e7})
    layer = load_mtp(tmp_path, TARGET, 1, torch.float32, "cpu")[0].layer.only_layer
    assert (layer.rope.partial_rotary_factor, layer.rope.theta, layer.attention_gate) == (0.25, 1e7, True)
    (tmp_path / "model.safetensors").unlink()
    make_tiny_mtp(tmp_path, "mimo", TARGET)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_types"], config["rope_parameters"]
    hub = config | {"rope_theta": 640000, "rope_scaling": None, "attention_bias": True, "sliding_window": 32768}
    (tmp_path / "config.json").write_text(json.dumps(hub))
    layer = load_mtp(tmp_path, TARGET, 1, torch.float32, "cpu")[0].layer.only_layer
    assert (layer.rope.theta, layer.qkv_bias, layer.o_bias, layer.qk_norm) == (640000.0, True, False, False)
    assert layer.window is None
