"""The keys that targets and drafters share: layer sizes and optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spec_lab.menu.choices import Choice
from spec_lab.menu.config import knob

MAX_LENGTH = 2048
"""The most tokens after a prompt in an evaluation."""


def width_of_layers(default: int) -> Any:
    """Make the knob with this default."""
    return knob(default, "width of the layers", least=1, most=2**16)


def width_of_feed_forward(default: int) -> Any:
    """Make the knob with this default."""
    return knob(default, "width of the feed-forward network", least=1, most=2**18)


def depth(default: int) -> Any:
    """Make the knob with this default."""
    return knob(default, "depth", least=1, most=1024)


def query_heads(default: int) -> Any:
    """Make the knob with this default."""
    return knob(default, "query heads of a layer, a multiple of its key-value heads", least=1, most=1024)


@dataclass
class LayerConfig:
    """The sizes of a layer that has its own keys and values."""

    intermediate_size: int = width_of_feed_forward(512)
    num_heads: int = query_heads(4)
    num_kv_heads: int = knob(2, "key-value heads of a layer", least=1, most=1024)
    head_dim: int = knob(64, "width of a head, an even number", least=2, most=1024)


@dataclass
class DraftLayerConfig:
    """The sizes of a drafter's layer that has its own keys and values; null takes that of the target's last layer."""

    intermediate_size: int | None = knob(
        512, "width of the feed-forward network; null: the target's", least=1, most=2**18
    )
    num_heads: int | None = knob(
        4, "query heads of a layer, a multiple of its key-value heads; null: the target's", least=1, most=1024
    )
    num_kv_heads: int | None = knob(2, "key-value heads of a layer; null: the target's", least=1, most=1024)
    head_dim: int | None = knob(64, "width of a head, an even number; null: the target's", least=2, most=1024)

    @property
    def sizes(self) -> LayerConfig:
        """The sizes, after nulls are replaced by the target's (`spec_lab.train.fitting.filled`)."""
        sizes = self.intermediate_size, self.num_heads, self.num_kv_heads, self.head_dim
        intermediate_size, num_heads, num_kv_heads, head_dim = (size for size in sizes if size is not None)
        return LayerConfig(intermediate_size, num_heads, num_kv_heads, head_dim)


class Optimiser(Choice):
    """The optimiser."""

    adamw = "adamw", "AdamW"
    muon = "muon", "Muon for the matrices of layers, AdamW for everything else"


@dataclass
class OptimisationConfig:
    """The optimisation of a module.

    The learning rate rises linearly over `num_warmup_steps`, and falls linearly to zero at `num_steps`. For a fixed
    number of tokens, decay to zero beats decay to a tenth (Bergsma et al., 2025, "Straight to Zero"). With a time
    limit, the rate falls with the steps or with the seconds, whichever are further advanced.
    """

    optimiser: Optimiser = knob(Optimiser.adamw, "what moves the weights")
    num_steps: int = knob(8000, "training steps", least=2, most=10**9)
    batch_size: int = knob(96, "rows a step", least=1, most=2**20)
    peak_learning_rate: float = knob(
        2e-3, "learning rate after the warm-up; it then falls linearly to zero", above=0, most=1
    )
    num_warmup_steps: int = knob(200, "steps over which the learning rate rises", least=1)
    weight_decay: float = knob(0.05, "on matrices only", least=0, most=1)
    max_grad_norm: float = knob(1.0, "longer gradients are scaled down to this length", above=0)
    checkpoint_every: int = knob(
        1000, "steps between two checkpoints, from which an interrupted training continues", least=1
    )
    log_every: int = knob(500, "steps whose mean loss is one point of the loss curve", least=1)
    max_seconds: float | None = knob(None, "time limit of the training, in seconds; null is none", above=0)


def moved_by(optimisation: Mapping[str, Any]) -> str:
    """Return the optimiser's name for a card. Records of older trainings do not name it; it was AdamW."""
    return Optimiser(optimisation.get("optimiser", Optimiser.adamw)).help
