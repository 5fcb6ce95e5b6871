"""A trainable MTP module with a layer of the target's kind: transformers' decoder layer, unrolled as in
`spec_lab.train.chain`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_lab.train.chain import attend_chain
from spec_lab.train.experts import balance_experts
from spec_lab.train.packed_rows import RowPlaces
from spec_lab.train.target import new_model
from spec_lab.train.unroll import UnderFrozenHead

IN_CHAINS = "spec_lab_in_chains"
"""The name under which `attend_in_chains` is registered with transformers."""
LAYER = "layer."


@dataclass(slots=True)
class StepsSoFar:
    """Keys and values `[batch, heads, rows, ...]` of the steps so far."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def attend_in_chains(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, chain: StepsSoFar, **_: Any
) -> tuple[Tensor, None]:
    """An attention function for transformers. It appends the keys and values to those of the chain's earlier steps, and
    attends by `attend_chain`."""
    group = query.shape[1] // key.shape[1]
    chain.keys.append(key.repeat_interleave(group, 1))
    chain.values.append(value.repeat_interleave(group, 1))
    return attend_chain(query, chain.keys, chain.values).transpose(1, 2), None


def one_layer_of(target: Any, intermediate_size: int) -> Any:
    """Make a model of the target's kind with one layer like the target's last. If that layer is dense,
    `intermediate_size` is the width of its feed-forward network."""
    from transformers import AttentionInterface

    AttentionInterface.register(IN_CHAINS, attend_in_chains)
    keys = target.config.to_dict() | {
        "num_hidden_layers": 1,
        "intermediate_size": intermediate_size,
        "dtype": "float32",
    }
    first = {"layer_types": target.config.layer_types[-1:]} if "layer_types" in keys else {"first_k_dense_replace": 0}
    return new_model(keys | first, attn_implementation=IN_CHAINS)


class TargetKindModule(UnderFrozenHead):
    """One module, which takes every draft step, and the target's frozen head. The norm before the head is initialised
    from the target's."""

    def __init__(self, target: Any, intermediate_size: int) -> None:
        super().__init__()
        model = one_layer_of(target, intermediate_size)
        self.layer, self.rotary, (hidden_size,) = (
            model.model.layers[0],
            model.model.rotary_emb,
            target.model.norm.weight.shape,
        )
        self.enorm, self.hnorm = model.model.norm, copy.deepcopy(model.model.norm)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": copy.deepcopy(target.model.norm).requires_grad_(True)})
        self.register_buffer("head_weight", target.get_output_embeddings().weight.detach(), persistent=False)
        balance_experts(self.layer)

    def unroll(
        self, embeddings: Tensor, features: tuple[Tensor, ...], num_steps: int, rows: RowPlaces | None = None
    ) -> list[Tensor]:
        """Unroll the module like `spec_lab.train.chain.unroll_chain`. The embedding precedes the hidden state in its
        input."""
        assert rows is None, "rows with several texts are not supported here"
        (hidden,) = features
        hidden, chain = hidden.float(), StepsSoFar()
        turns = self.rotary(hidden, torch.arange(hidden.shape[1], device=hidden.device)[None])
        states: list[Tensor] = []
        for _ in range(num_steps):
            joined = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))
            left = self.layer(joined, position_embeddings=turns, attention_mask=None, chain=chain)
            states.append(self.shared_head["norm"](left))
            hidden = F.pad(states[-1][:, :-1], (0, 0, 1, 0))
        return states

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the module's tensors under DeepSeek's names without prefix, with a tensor for each expert."""
        tensors = {name.removeprefix(LAYER): tensor for name, tensor in self.state_dict().items()}
        for name in [name for name in tensors if name.startswith("mlp.experts.")]:
            stack = tensors.pop(name)
            parts = {"gate_proj": 0, "up_proj": 1} if name.endswith("gate_up_proj") else {"down_proj": 0}
            for part, index in parts.items():
                for expert, weight in enumerate(stack.chunk(len(parts), dim=1)[index]):
                    tensors[f"mlp.experts.{expert}.{part}.weight"] = weight
        return tensors

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy weights into the tensors of `named_tensors`, which are views of the module's memory."""
        for name, mine in self.named_tensors().items():
            mine.copy_(tensors[name])
