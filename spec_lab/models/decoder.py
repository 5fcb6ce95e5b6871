"""Decoder targets: inference code over weights with Hugging Face names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass
from spec_lab.core.rows import rows_at
from spec_lab.core.types import FeatureSpec, NormSide, TargetOutput
from spec_lab.models.launching import launching_of
from spec_lab.models.layer_builder import build_layer
from spec_lab.models.layer_stack import LayerStack, Stack
from spec_lab.models.linear import can_pack, whole_linear
from spec_lab.models.norms import make_norm
from spec_lab.models.partition import WHOLE, Partition
from spec_lab.models.rope import rotary_table


class Decoder(ABC):
    """The common part of the targets of all families: embedding, head, rotary tables and sizes.

    Attributes:
        config: that of the whole model.
        layer_plans: this process's share of each layer, and of its cache.
        kernels: replace the parts that they have.
        layers: first to last.
        final_norm_weight: [hidden_size] of the norm before the head.
        num_positions: the number of rows in the rotary tables.
        num_tokens: ids from here on are padding of the vocabulary, and get logit -inf.
    """

    layers: Sequence[Any]

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        max_positions: int | None,
        partition: Partition,
        kernels: KernelSet,
    ) -> None:
        """`tensors`: this process's share of each, as `partition` splits it; `kernels`: replace parts."""
        self.config = config
        self.partition = partition
        self.kernels = kernels
        self.layer_plans = tuple(partition.share(plan) for plan in config.layers)
        self.vocab_size = self.num_tokens = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        self.eos_token_ids = frozenset(config.eos_token_ids)
        self.embedding = tensors["model.embed_tokens.weight"]
        head = self.embedding if config.tie_word_embeddings else tensors["lm_head.weight"]
        # A packed product can return its weight, so the weight need not be stored twice.
        reads_back = partition is WHOLE and can_pack(head)
        self._dense_head = None if reads_back and not config.tie_word_embeddings else head
        self._head = kernels.get(Op.LINEAR, partition.head(head))
        self.final_norm_weight = tensors["model.norm.weight"]
        self.num_positions = max_positions or config.max_position_embeddings
        shapes = [(plan.rope, plan.head_dim) for plan in config.layers]
        distinct = list(dict.fromkeys(shapes))
        like = self.embedding
        self.rotary_tables = [rotary_table(*shape, self.num_positions, like.dtype, like.device) for shape in distinct]
        self._table_of_layer = [distinct.index(shape) for shape in shapes]

    @property
    def head_weight(self) -> torch.Tensor:
        """The weight [vocab, hidden_size] of the product that gives logits."""
        return whole_linear(self._head).dense_weight() if self._dense_head is None else self._dense_head

    @abstractmethod
    def forward(self, token_ids: torch.Tensor, at: Pass, features: FeatureSpec) -> TargetOutput:
        """Run rows through all layers (`Target.forward`)."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._all_logits(hidden)
        if self.num_tokens < self.vocab_size:
            logits[..., self.num_tokens :] = float("-inf")
        return logits

    def _all_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)


class DecoderTarget(Decoder):
    """A `Target` like Llama: pre-norm residual blocks."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        backend: AttentionBackend,
        max_positions: int | None = None,
        partition: Partition = WHOLE,
        kernels: KernelSet = TORCH_FORMS,
    ) -> None:
        """`tensors`: this process's share of each, as `partition` splits it."""
        super().__init__(config, tensors, max_positions, partition, kernels)
        eps = config.rms_norm_eps
        self._launching = launching_of(kernels, self.layer_plans)
        final = make_norm(self.final_norm_weight, eps, config.layers[-1].float32_norms)
        self._norm = kernels.get(Op.NORM, final)
        self.layers = [
            kernels.get(
                Op.LAYER, build_layer(plan, eps, tensors, f"model.layers.{index}.", backend, partition, kernels)
            )
            for index, plan in enumerate(self.layer_plans)
        ]
        stack = LayerStack(self.layers, self.rotary_tables, self._table_of_layer)
        self._stack: Stack = kernels.get(Op.STACK, stack)

    def forward(self, token_ids: torch.Tensor, at: Pass, features: FeatureSpec) -> TargetOutput:
        with self._launching(token_ids.shape[0]):
            stream = rows_at(self.embedding, token_ids)
            stream, taps = self._stack(stream, at, features.layer_inputs)
            hidden = self._norm(at.kept.live(stream))
        return TargetOutput(hidden, read_features(features, taps, stream, hidden, token_ids.shape[0]))


def read_features(
    features: FeatureSpec, taps: list[torch.Tensor], stream: torch.Tensor, hidden: torch.Tensor, num_rows: int
) -> torch.Tensor | None:
    """Concatenate the features that a drafter reads: tapped layer inputs, and maybe the last hidden state before or
    after its norm. Return None if it reads none."""
    if features.final_hidden is not None:
        last = hidden if features.final_hidden is NormSide.POST_NORM else stream
        assert features.last_prompt_row or last.shape[0] == num_rows, "select every row"
        taps = [*taps, last]
    return torch.cat(taps, dim=-1) if taps else None
