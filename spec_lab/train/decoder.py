"""Targets of other families than Qwen3 as trained: decoders built from the same plan per layer as the runtime's.

The plan is read from the very `config.json` that is saved, so training and runtime cannot mean two things by it. To the
recipes of drafters such a decoder looks as a model of transformers does: it is called alike and returns alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families.table import read_decoder
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.train.attention_kinds import attend, attention_of, rotation_of
from spec_lab.train.data import next_token_loss
from spec_lab.train.delta_net import TrainableDeltaNet
from spec_lab.train.experts import TrainableExperts
from spec_lab.train.layers import INITIAL_STD, Rotation, SwiGLU, TrainableRMSNorm


@dataclass(slots=True)
class KeysValues:
    """A layer's keys and values `[batch, num_kv_heads, rows, head_dim]`, normed and rotated; None where it has none."""

    keys: Tensor | None
    values: Tensor | None


@dataclass(slots=True)
class CachedLayers:
    """Stands where transformers returns its cache."""

    layers: list[KeysValues]


@dataclass(slots=True)
class DecoderOutput:
    """The fields of a transformers output that the recipes read. `hidden_states[i]` is the input of layer i; the last
    one is the final norm's output."""

    logits: Tensor
    hidden_states: tuple[Tensor, ...]
    past_key_values: CachedLayers


class DecoderSettings:
    """The keys of `config.json` as they are saved, and what the runtime reads there."""

    def __init__(self, keys: dict[str, Any]) -> None:
        self.keys = keys
        self.model: ModelConfig = read_decoder(keys, "config.json of the recipe")

    def to_json_string(self) -> str:
        return json.dumps(self.keys)

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.model.hidden_size


class TrainableLayer(nn.Module):
    """A layer of a delta net or of attention, and behind it an MLP or experts, under the names of checkpoints."""

    def __init__(self, plan: LayerPlan, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = TrainableRMSNorm(hidden_size, eps)
        if plan.delta_net is not None:
            self.linear_attn = TrainableDeltaNet(plan.delta_net, hidden_size, eps)
        else:
            self.self_attn = attention_of(plan, hidden_size, eps)
        self.post_attention_layernorm = TrainableRMSNorm(hidden_size, eps)
        self.mlp = mlp_of(plan, hidden_size)
        self.keeps_state = plan.delta_net is not None

    def forward(self, stream: Tensor, rotation: Rotation) -> Tensor:
        """Turn `[batch, rows, hidden]` into the same."""
        rows = self.input_layernorm(stream)
        stream = stream + (self.linear_attn(rows) if self.keeps_state else attend(self.self_attn, rows, rotation))
        return stream + self.mlp(self.post_attention_layernorm(stream))


def mlp_of(plan: LayerPlan, hidden_size: int) -> nn.Module:
    """Make what a layer's plan has behind attention."""
    if plan.experts is None:
        return SwiGLU(hidden_size, plan.intermediate_size)
    return TrainableExperts(plan.experts, hidden_size)


class DecoderStack(nn.Module):
    """The part that a checkpoint keeps under `model.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            TrainableLayer(plan, config.hidden_size, config.rms_norm_eps) for plan in config.layers
        )
        self.norm = TrainableRMSNorm(config.hidden_size, config.rms_norm_eps)


class TrainableDecoder(nn.Module):
    """A decoder with tied embeddings; `state_dict()` has the names of checkpoints, less what a family writes otherwise
    (`spec_lab.train.decoder_checkpoint`)."""

    def __init__(self, keys: dict[str, Any]) -> None:
        super().__init__()
        self.config = DecoderSettings(keys)
        self.model = self._stack()
        self.model.apply(initialise)

    def _stack(self) -> Any:
        return DecoderStack(self.config.model)

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    def get_input_embeddings(self) -> nn.Module:
        embedding: nn.Module = self.model.embed_tokens
        return embedding

    def get_output_embeddings(self) -> nn.Embedding:
        """Hold the head as its `weight`."""
        embedding: nn.Embedding = self.model.embed_tokens
        return embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        use_cache: bool = False,
        output_hidden_states: bool = False,
    ) -> DecoderOutput:
        """Run one causal forward over rows `[batch, length]`. The last three are transformers' way to ask for what is
        always returned here."""
        hidden_states, keys_values = self.run(input_ids)
        return DecoderOutput(self.logits(hidden_states[-1]), tuple(hidden_states), CachedLayers(keys_values))

    def run(self, tokens: Tensor) -> tuple[list[Tensor], list[KeysValues]]:
        """Return every layer's input and the final norm's output `[batch, length, hidden]`, and what layers would
        cache."""
        stream = self.model.embed_tokens(tokens)
        rotation = rotation_of(self._attending(), tokens.shape[1], tokens.device)
        inputs = []
        for layer in self.model.layers:
            inputs.append(stream)
            stream = layer(stream, rotation)
        return [*inputs, self.model.norm(stream)], [KeysValues(None, None) for _ in inputs]

    def _attending(self) -> LayerPlan:
        """The layers with attention all turn alike."""
        return next(plan for plan in self.config.model.layers if plan.delta_net is None)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[..., vocab_size]` from what the final norm leaves."""
        return F.linear(hidden, self.model.embed_tokens.weight)


@contextmanager
def products_in_tf32() -> Iterator[None]:
    """Let float32 products run on a GPU's tensor cores, rounded to 10 bits of mantissa: those of delta nets, in
    training."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class DecoderLoss(nn.Module):
    """Mean cross-entropy of the next token over rows `[batch, length]` and labels `[batch, length - 1]`."""

    def __init__(self, model: TrainableDecoder) -> None:
        super().__init__()
        self.model = model
        self._behind_layers: Callable[[Tensor, Tensor], Tensor] = self._head_loss

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        hidden_states, _ = self.model.run(rows)
        return self._behind_layers(hidden_states[-1], labels)

    def compiled(self) -> DecoderLoss:
        """Return the same, compiled in parts: layers of a kind are compiled once, where a whole decoder takes a
        minute."""
        compile_layers(self.model)
        self._behind_layers = torch.compile(self._head_loss)
        return self

    def _head_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return next_token_loss(self.model.logits(hidden), labels)


def compile_layers(decoder: TrainableDecoder) -> None:
    """Layers whose plans agree share what is compiled."""
    for layer in decoder.model.layers:
        layer.compile()


def compile_on_gpu(target: TrainableDecoder, device: torch.device) -> None:
    """Compile the forward of a target that a drafter is trained beside; its batches are all of one shape."""
    if device.type == "cuda":
        compile_layers(target)


def initialise(module: nn.Module) -> None:
    """Set first weights of plain matrices; norms, convolutions, experts and what a module sets itself stay."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=INITIAL_STD)
