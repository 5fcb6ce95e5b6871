"""The EAGLE-3 drafter against a chain recomputed from the checkpoint's tensors, without any cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from spec_lab.checkpoints.families import read_model_config
from tests.covering import each_value
from tests.lab import Reference, assert_captured_alike, make_config, random_requests
from tests.scripted_rule import ScriptedRule, compare_drafts
from tests.tiny_checkpoints import make_tiny_eagle3, make_tiny_target

HEADS: dict[str, dict[str, Any]] = {
    "safeailab": {},
    "speculators": {"format": "speculators"},
    "norm_before_residual": {"norm_before_residual": True},
    "speculators_norm_before_residual": {"format": "speculators", "norm_before_residual": True},
    "qwen3_layer": {"family": "qwen3"},
    "own_embedding": {"embed_tokens": True},
    "whole_vocabulary": {"draft_vocab_size": 160},
    "other_taps": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
    "own_rope": {"rope_theta": 300.0},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "eagle31": {"format": "speculators", "fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "other_heads": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
}
PRUNES = ["none", "catchup"]


@dataclass
class SlowHead:
    """The paper's head in a few lines: every row of the chain is recomputed for every draft."""

    tensors: dict[str, torch.Tensor]
    options: dict[str, Any]
    reference: Reference
    window: int | None = None

    @torch.inference_mode()
    def draft(self, text: list[int], num_draft_tokens: int) -> tuple[list[int], list[torch.Tensor]]:
        """Drafts after `text` and the logits of each. Row p pairs token t[p+1] with the feature of position p."""
        hidden_states = self.reference.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        taps = self.options.get("eagle_aux_hidden_state_layer_ids", [2, 4, 5])
        features = self._normed_taps([hidden_states[layer][0, :-1] for layer in taps])
        rows, tokens = features @ self.tensors["fc.weight"].T, text[1:]
        drafts, all_logits = [], []
        for _ in range(num_draft_tokens):
            out = self._layer(tokens, rows)[-1]
            normed = self._norm(out, "norm")
            all_logits.append(self._in_target_ids(normed @ self.tensors["lm_head.weight"].T))
            drafts.append(int(all_logits[-1].argmax()))
            recycled = normed if self.options.get("norm_output") else out
            tokens, rows = [*tokens, drafts[-1]], torch.cat((rows, recycled[None]))
        return drafts, all_logits

    def _normed_taps(self, taps: list[torch.Tensor]) -> torch.Tensor:
        if self.options.get("fc_norm"):
            taps = [self._norm(tap, f"fc_norm.{index}") for index, tap in enumerate(taps)]
        features = torch.cat(taps, dim=-1)
        return self._norm(features, "input_norm") if self.options.get("norm_before_fc") else features

    def _in_target_ids(self, logits: torch.Tensor) -> torch.Tensor:
        if "d2t" not in self.tensors:
            return logits
        target_ids = torch.arange(len(logits)) + self.tensors["d2t"]
        return logits.new_full((160,), float("-inf")).index_put((target_ids,), logits)

    def _layer(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        get = self.tensors.__getitem__
        table = self.tensors.get("embed_tokens.weight", self.reference.model.model.embed_tokens.weight)
        normed = self._norm(hidden, "midlayer.hidden_norm")
        attended = self._attention(torch.cat((self._norm(table[tokens], "midlayer.input_layernorm"), normed), dim=-1))
        stream = (normed if self.options.get("norm_before_residual") else hidden) + attended
        rows = self._norm(stream, "midlayer.post_attention_layernorm")
        gate = F.silu(rows @ get("midlayer.mlp.gate_proj.weight").T) * (rows @ get("midlayer.mlp.up_proj.weight").T)
        return stream + gate @ get("midlayer.mlp.down_proj.weight").T

    def _attention(self, rows: torch.Tensor) -> torch.Tensor:
        prefix, head_dim = "midlayer.self_attn.", self.options.get("head_dim", 16)
        q, k, v = (
            (rows @ self.tensors[f"{prefix}{name}_proj.weight"].T).view(len(rows), -1, head_dim) for name in "qkv"
        )
        if f"{prefix}q_norm.weight" in self.tensors:
            q, k = self._norm(q, f"{prefix}q_norm"), self._norm(k, f"{prefix}k_norm")
        q, k = self._rotate(q), self._rotate(k)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5
        behind = torch.arange(len(rows)).unsqueeze(1) - torch.arange(len(rows))
        hidden = (behind < 0) | (behind >= (self.window or len(rows)))
        scores = scores.masked_fill(hidden, float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        return out @ self.tensors[f"{prefix}o_proj.weight"].T

    def _rotate(self, heads: torch.Tensor) -> torch.Tensor:
        half = heads.shape[-1] // 2
        frequencies = self.options.get("rope_theta", 10000.0) ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(len(heads)), frequencies).unsqueeze(1)
        first, second = heads[..., :half], heads[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.tensors[f"{name}.weight"]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Reference]]:
    """Two targets: one with GQA 4:2, and one with a key-value head for each query head, which no head here has."""
    found = {}
    targets: dict[str, dict[str, Any]] = {"gqa": {}, "mha": {"num_key_value_heads": 4}}
    for name, options in targets.items():
        folder = tmp_path_factory.mktemp(name)
        make_tiny_target(folder, "qwen3", **options)
        found[name] = folder, Reference(folder)
    return found


def run_against_slow_chain(
    target: tuple[Path, Reference],
    folder: Path,
    head: dict[str, Any],
    prune: str,
    num_draft_tokens: int = 3,
    window: int | None = None,
    **sizes: int,
) -> ScriptedRule:
    tensors = make_tiny_eagle3(folder, read_model_config(target[0]), **head)
    slow, pair, options = SlowHead(tensors, head, target[1], window), (target[0], folder), {"window": window}
    return compare_drafts(slow, pair, "eagle3", num_draft_tokens, prune, num_requests=3, options=options, **sizes)


@pytest.mark.parametrize(("head", "prune"), each_value(HEADS, PRUNES))
def test_drafts_equal_the_whole_chain_recomputed(
    targets: dict[str, tuple[Path, Reference]], tmp_path: Path, head: str, prune: str
) -> None:
    """They are compared after prompts of one token and of several chunks, and after rounds of every n."""
    rule = run_against_slow_chain(targets["gqa"], tmp_path, HEADS[head], prune)
    assert set(rule.accepted) == {0, 1, 2, 3} and rule.compared > 30


@pytest.mark.parametrize(
    ("prune", "window", "page_size", "bucket"),
    [
        ("none", 1, 4, 1),
        ("prefill", 3, 1, 4),
        ("post_attention", 5, 16, 4),
        ("catchup", 17, 4, 4),
        ("catchup", 1000, 4, 1),
    ],
)
def test_a_window_equals_the_slow_chain_with_one(
    targets: dict[str, tuple[Path, Reference]], tmp_path: Path, window: int, page_size: int, bucket: int, prune: str
) -> None:
    """A window counts in prompts longer than it, in catch-ups and recurrent steps, over page borders and beside
    padded rows.
    """
    target = targets["gqa"]
    rule = run_against_slow_chain(target, tmp_path, {}, prune, 4, bucket=bucket, window=window, page_size=page_size)
    assert set(rule.accepted) == {0, 1, 2, 3, 4} and rule.compared > 30


def test_a_head_may_group_its_heads_in_another_way_than_the_target(
    targets: dict[str, tuple[Path, Reference]], tmp_path: Path
) -> None:
    rule = run_against_slow_chain(targets["mha"], tmp_path, {}, "catchup")
    assert rule.compared > 30


@pytest.mark.parametrize(("num_draft_tokens", "bucket"), [(1, 4), (5, 1)])
def test_other_numbers_of_drafts_and_padded_rows(
    targets: dict[str, tuple[Path, Reference]], tmp_path: Path, num_draft_tokens: int, bucket: int
) -> None:
    rule = run_against_slow_chain(targets["gqa"], tmp_path, {}, "catchup", num_draft_tokens, bucket=bucket)
    assert set(rule.accepted) == set(range(num_draft_tokens + 1))


@pytest.mark.parametrize("graph", ["step_replay", "full_loop"])
def test_a_window_moves_under_captured_rounds(
    targets: dict[str, tuple[Path, Reference]], tmp_path: Path, graph: str
) -> None:
    """Its start follows from the position: a mask as it was at capture would give other drafts."""
    make_tiny_eagle3(tmp_path, read_model_config(targets["gqa"][0]), fc_norm=True, norm_output=True)
    pair, cache = (targets["gqa"][0], tmp_path), {"page_size": 4}
    config = make_config(pair, "eagle3", 4, "catchup", batch_size=3, cache=cache, options={"window": 5})
    assert_captured_alike(config, graph, random_requests(3, 8, lengths=(1, 12), seed=2))
