"""EAGLE-3 heads with latent attention, as those for Kimi-K2.5, against a chain recomputed with all keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.eagle3_checkpoint import load_eagle3
from spec_lab.checkpoints.families import read_model_config
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.models.eagle3 import Eagle3Head
from spec_lab.options.trees import DynamicTreeConfig
from tests.lab import Reference, assert_captured_alike, generate, make_config, random_requests
from tests.scripted_rule import ScriptedRule, compare_drafts
from tests.test_catchup_pruning import (
    HIDDEN,
    KNOB,
    MAX_SEQ_LEN,
    assert_pruning_changes_nothing,
    make_lane,
    random_round,
)
from tests.test_eagle3_drafter import SlowHead
from tests.tiny_checkpoints import make_tiny_eagle3
from tests.tiny_latent import SIZES, make_latent_eagle3, make_latent_target
from tests.tiny_mtp import make_tiny_mtp

HEADS: dict[str, dict[str, Any]] = {
    "kimi_k25": {},
    "no_narrow_query": {"q_lora_rank": None, "qk_nope_head_dim": 12, "v_head_dim": 20},
    "eagle31": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "nested_ids": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}},
    "flat_ids": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
}
TAPS = {"nested_ids": [1, 3, 6], "flat_ids": [1, 3, 6]}


class SlowLatentHead(SlowHead):
    """Unfolds keys and values of all heads for every row. All norms have the eps of config.json, as in the engines."""

    def _attention(self, rows: torch.Tensor) -> torch.Tensor:
        sizes = SIZES | self.options
        latents, rotated = sizes["kv_lora_rank"], sizes["qk_rope_head_dim"]
        plain, values = sizes["qk_nope_head_dim"], sizes["v_head_dim"]
        queries = self._queries(rows).view(len(rows), 4, plain + rotated)
        latent, key = (rows @ self._weight("kv_a_proj_with_mqa").T).split((latents, rotated), dim=-1)
        latent = self._norm(latent, "midlayer.self_attn.kv_a_layernorm")
        unfolded = (latent @ self._weight("kv_b_proj").T).view(len(rows), 4, plain + values)
        plain_keys, heads_values = unfolded.split((plain, values), dim=-1)
        cos, sin, mscale = self._yarn(len(rows), rotated)
        scores = torch.einsum("qhd,khd->hqk", queries[..., :plain], plain_keys)
        turned = self._turn(queries[..., plain:], cos, sin), self._turn(key.unsqueeze(1), cos, sin).squeeze(1)
        scores = (scores + torch.einsum("qhd,kd->hqk", *turned)) * (plain + rotated) ** -0.5 * mscale**2
        behind = torch.arange(len(rows)).unsqueeze(1) - torch.arange(len(rows))
        hidden = (behind < 0) | (behind >= (self.window or len(rows)))
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), heads_values)
        return out.flatten(1) @ self._weight("o_proj").T

    def _queries(self, rows: torch.Tensor) -> torch.Tensor:
        if "midlayer.self_attn.q_proj.weight" in self.tensors:
            return rows @ self._weight("q_proj").T
        narrow = self._norm(rows @ self._weight("q_a_proj").T, "midlayer.self_attn.q_a_layernorm")
        return narrow @ self._weight("q_b_proj").T

    def _weight(self, name: str) -> torch.Tensor:
        return self.tensors[f"midlayer.self_attn.{name}.weight"]

    def _turn(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Neighbouring channels are a pair."""
        first, second = heads[..., 0::2], heads[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)

    def _yarn(self, length: int, width: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        """The reference implementation's frequencies for factor 8 from 64 positions, theta 300, and its mscale."""
        borders = [
            width * torch.log(torch.tensor(64 / (turns * 2 * torch.pi))) / (2 * torch.log(torch.tensor(300.0)))
            for turns in (32.0, 1.0)
        ]
        low, high = max(float(borders[0].floor()), 0.0), min(float(borders[1].ceil()), width - 1.0)
        kept = 1 - ((torch.arange(width // 2) - low) / (high - low)).clamp(0, 1)
        frequencies = 300.0 ** -(torch.arange(0, width, 2) / width)
        frequencies = frequencies / 8 * (1 - kept) + frequencies * kept
        angles = torch.outer(torch.arange(length), frequencies).unsqueeze(1)
        return angles.cos(), angles.sin(), 1.2079441541679836

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return rows / (rows.pow(2).mean(-1, keepdim=True) + 0.01).sqrt() * self.tensors[f"{name}.weight"]


@pytest.fixture(scope="module")
def latent_target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp("latent_target")
    make_latent_target(folder, num_hidden_layers=7)
    return folder, Reference(folder)


def run_against_slow_chain(
    target: tuple[Path, Reference], folder: Path, head: str, prune: str, window: int | None = None, bucket: int = 1
) -> ScriptedRule:
    config = read_model_config(target[0])
    tensors = make_latent_eagle3(folder, config, **HEADS[head])
    taps = TAPS.get(head, [2, config.num_layers // 2, config.num_layers - 3])
    slow = SlowLatentHead(tensors, HEADS[head] | {"eagle_aux_hidden_state_layer_ids": taps}, target[1])
    slow.window = window
    sizes = {"max_new_tokens": 18, "bucket": bucket}
    return compare_drafts(slow, (target[0], folder), "eagle3", 3, prune, options={"window": window}, **sizes)


@pytest.mark.parametrize(
    ("head", "prune"),
    [
        *((head, "catchup") for head in HEADS),
        *(("kimi_k25", prune) for prune in ("none", "post_attention")),
    ],
)
def test_drafts_equal_the_whole_chain_recomputed(
    target: tuple[Path, Reference], tmp_path: Path, head: str, prune: str
) -> None:
    """A target with keys and values for its heads, a head with latent rows: the kind of cache belongs to the layer."""
    rule = run_against_slow_chain(target, tmp_path, head, prune)
    assert set(rule.accepted) == {0, 1, 2, 3} and rule.compared > 50


def test_a_window_and_padded_rows(target: tuple[Path, Reference], tmp_path: Path) -> None:
    rule = run_against_slow_chain(target, tmp_path, "kimi_k25", "catchup", window=5, bucket=4)
    assert set(rule.accepted) == {0, 1, 2, 3} and rule.compared > 50


def test_on_a_target_with_latent_attention(latent_target: tuple[Path, Reference], tmp_path: Path) -> None:
    rule = run_against_slow_chain(latent_target, tmp_path, "flat_ids", "catchup")
    assert set(rule.accepted) == {0, 1, 2, 3} and rule.compared > 50


def test_a_head_with_keys_and_values_on_a_target_with_latent_attention(
    latent_target: tuple[Path, Reference], tmp_path: Path
) -> None:
    """The reverse: text equals greedy decoding by transformers."""
    folder, reference = latent_target
    taps = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    make_tiny_eagle3(tmp_path, read_model_config(folder), **taps)
    requests = random_requests(3, max_new_tokens=12)
    plain = {request.request_id: reference.greedy(request) for request in requests}
    config = make_config((folder, tmp_path), "eagle3", prune="catchup", batch_size=3)
    reference.assert_lossless(requests, generate(config, requests), plain)


@dataclass
class Models:
    """Makes heads for a lane of the tests of catch-up pruning."""

    pair: tuple[Path, Path]

    def head(self, backend: AttentionBackend, window: int | None) -> Eagle3Head:
        config = read_model_config(self.pair[0])
        head_config, tensors = load_eagle3(self.pair[1], config, torch.float32, "cpu")
        embedding = torch.randn(160, HIDDEN, generator=torch.Generator().manual_seed(1))
        return Eagle3Head(head_config, tensors, embedding, embedding, backend, MAX_SEQ_LEN, window)


@pytest.fixture(scope="module")
def models(target: tuple[Path, Reference], tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("head")
    make_latent_eagle3(folder, read_model_config(target[0]))
    return Models((target[0], folder))


def test_pruned_catchup_writes_the_same_rows_and_drafts_the_same(models: Models) -> None:
    """Requests with n = 1..N beside padded rows, in rounds one after another: bit-equal caches, and equal drafts."""
    lanes = {knob: make_lane(models, knob, [1, 7, 16, 31], num_padded=2) for knob in KNOB}
    for seed, num_emitted in enumerate(([1, 2, 3, 4], [4, 3, 2, 1], [2, 4, 1, 1])):
        tokens, features = random_round(4, 4, seed)
        assert_pruning_changes_nothing(lanes, tokens, features, num_emitted)
        for lane in lanes.values():
            lane.kv_lens = lane.kv_lens + torch.tensor(num_emitted)


@pytest.mark.parametrize("graph", ["round", "step_replay"])
def test_graphs_hold_latent_attention(latent_target: tuple[Path, Reference], tmp_path: Path, graph: str) -> None:
    make_latent_eagle3(tmp_path, read_model_config(latent_target[0]), **HEADS["flat_ids"])
    config = make_config((latent_target[0], tmp_path), "eagle3", prune="catchup", batch_size=3)
    assert_captured_alike(config, graph, random_requests(3, max_new_tokens=8))


@pytest.mark.parametrize("drafter", ["eagle3", "mtp_eagle"])
def test_branches_of_latent_rows(latent_target: tuple[Path, Reference], tmp_path: Path, drafter: str) -> None:
    """A tree on a target with latent attention, drafted by layers that have it: text equals greedy decoding."""
    folder, reference = latent_target
    config = read_model_config(folder)
    if drafter == "eagle3":
        make_latent_eagle3(tmp_path, config, **HEADS["flat_ids"])
    else:
        make_tiny_mtp(tmp_path, "deepseek", config)
    requests = random_requests(3, max_new_tokens=10)
    plain = {request.request_id: reference.greedy(request) for request in requests}
    tree = DynamicTreeConfig(depth=3, num_rows=6, topk=2)
    config_of_run = make_config((folder, tmp_path), drafter, prune="catchup", batch_size=2, tree=tree)
    reference.assert_lossless(requests, generate(config_of_run, requests), plain)
