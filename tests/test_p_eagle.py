"""The P-EAGLE drafter against one causal pass over the whole text and its mask rows, without any cache."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from spec_lab.checkpoints.eagle3_checkpoint import read_eagle3_config
from spec_lab.checkpoints.families import read_model_config
from tests.lab import Reference
from tests.scripted_rule import compare_drafts
from tests.test_eagle3_drafter import SlowHead
from tests.tiny_blocks import make_tiny_p_eagle
from tests.tiny_checkpoints import rewrite_config
from tests.tiny_latent import make_latent_eagle3


@dataclass
class SlowPEagle(SlowHead):
    """Row p pairs t[p+1] with h[p]; behind the last one stand mask tokens with the learned features."""

    num_layers: int = field(default=2, kw_only=True)

    @torch.inference_mode()
    def draft(self, text: list[int], num_draft_tokens: int) -> tuple[list[int], list[torch.Tensor]]:
        states = self.reference.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer][0, :-1] for layer in (2, 4, 5)], dim=-1)
        masks = self.tensors["mask_hidden"][0].expand(num_draft_tokens - 1, -1)
        rows = torch.cat((features, masks)) @ self.tensors["fc.weight"].T
        stream = self._layer([*text[1:], *[159] * (num_draft_tokens - 1)], rows)
        for index in range(1, self.num_layers):
            stream = self._plain_layer(stream, f"layers.{index}.")
        logits = self._norm(stream[-num_draft_tokens:], "norm") @ self.tensors["lm_head.weight"].T
        found = [self._in_target_ids(row) for row in logits]
        return [int(row.argmax()) for row in found], found

    def _plain_layer(self, stream: torch.Tensor, prefix: str) -> torch.Tensor:
        """A Llama layer, with the attention of the first one."""
        own = {name: tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}
        as_first = {name.replace(prefix, "midlayer."): tensor for name, tensor in own.items()}
        layer = SlowHead(as_first, self.options, self.reference)
        stream = stream + layer._attention(layer._norm(stream, "midlayer.input_layernorm"))
        rows = layer._norm(stream, "midlayer.post_attention_layernorm")
        gate, up, down = (own[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return stream + (F.silu(rows @ gate.T) * (rows @ up.T)) @ down.T


@pytest.mark.parametrize(
    ("num_layers", "num_drafts", "prune"),
    [(1, 3, "catchup"), (2, 3, "none"), (2, 4, "catchup"), (3, 3, "post_attention"), (2, 1, "prefill")],
)
def test_drafts_equal_one_pass_over_the_whole_text(
    target: tuple[Path, Reference], tmp_path: Path, num_layers: int, num_drafts: int, prune: str
) -> None:
    """They are compared after prompts of one token and of several chunks, and after rounds of every n."""
    tensors = make_tiny_p_eagle(tmp_path / "head", read_model_config(target[0]), num_layers)
    slow, pair = SlowPEagle(tensors, {}, target[1], num_layers=num_layers), (target[0], tmp_path / "head")
    rule = compare_drafts(slow, pair, "p_eagle", num_drafts, prune, max_new_tokens=14, bucket=4)
    assert set(rule.accepted) == set(range(num_drafts + 1)) and rule.compared > 15


def test_all_layers_with_latent_attention_are_dense(target: tuple[Path, Reference], tmp_path: Path) -> None:
    """The config repeats the target's keys for experts."""
    config = read_model_config(target[0])
    make_latent_eagle3(tmp_path, config)
    layers = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 3}
    kind = {"speculators_model_type": "peagle", "norm_before_residual": False, "mask_token_id": 159}
    rewrite_config(tmp_path, transformer_layer_config=layers, **kind)
    head = read_eagle3_config(tmp_path, config, "peagle")
    plans = (*head.layer.layers, *head.more_layers)
    assert len(plans) == 3 and all(plan.latent is not None and plan.experts is None for plan in plans)
