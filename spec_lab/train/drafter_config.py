"""The schemas of `drafter=` in a training, one for each drafter and one for none. Those of block drafters
and P-EAGLE are in `block_config.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from spec_lab.menu.choices import Choice
from spec_lab.menu.config import knob
from spec_lab.train.module_config import (
    DraftLayerConfig,
    OptimisationConfig,
    depth,
    query_heads,
    width_of_feed_forward,
    width_of_layers,
)


@dataclass
class DrafterChoice:
    """The keys that every option of `drafter` has."""

    name: str = MISSING

    @property
    def drafts_as(self) -> str:
        """The `drafter=` option of a run that uses its weights; their folder is named after it."""
        return self.name


@dataclass
class DrafterTrainingConfig(DrafterChoice):
    """The keys of every trained drafter."""

    optimisation: OptimisationConfig = field(default_factory=OptimisationConfig, metadata={"help": "how it is trained"})


class Loss(Choice):
    """The losses of a drafted row: p is the target's distribution, q the drafter's."""

    kl = "kl", "cross-entropy of q against p, which is KL(p, q) plus a constant"
    ce = "ce", "cross-entropy against the target's likeliest token"
    tv = "tv", "total variation, 1 - sum min(p, q)"
    nla = "nla", "-log of the overlap, sum min(p, q)"
    lk = "lk", "kl where they hardly overlap, tv where they do; the weight of kl is exp(-3 overlap)"


@dataclass
class PackedTrainingConfig(DrafterTrainingConfig):
    """The keys of a drafter that learns from the target's distribution."""

    loss: Loss = knob(Loss.kl, "how the target's distribution and the drafter's are compared")

    @property
    def num_trained_drafts(self) -> int:
        """The number of drafts of a round in training."""
        raise NotImplementedError

    @property
    def drafter_words(self) -> tuple[str, ...]:
        """The overrides besides `drafter=` with which a run uses everything that was trained."""
        return ()


@dataclass
class UnrolledTrainingConfig(PackedTrainingConfig):
    """The keys of a drafter that is unrolled over its steps: step i counts `step_loss_decay ** i`."""

    num_unrolled_steps: int = knob(5, "draft steps that training unrolls", least=1, most=64)
    step_loss_decay: float = knob(0.8, "weight of a step's loss, relative to that of the step before", least=0, most=1)

    @property
    def num_trained_drafts(self) -> int:
        return self.num_unrolled_steps


@dataclass
class Eagle3TrainingConfig(DraftLayerConfig, UnrolledTrainingConfig):
    """drafter=eagle3: a one-layer EAGLE-3 head."""

    name: str = "eagle3"
    draft_vocab_size: int = knob(
        2048, "tokens that can be drafted: some special ones, and those the target writes most", least=2, most=2**20
    )
    norms_taps: bool = knob(False, "a norm for each tapped state, as in EAGLE-3.1")
    norms_output: bool = knob(False, "feed back the output of the final norm, as in EAGLE-3.1")


@dataclass
class MtpTrainingConfig(DraftLayerConfig, UnrolledTrainingConfig):
    """Multi-token prediction modules: one that takes every unrolled step, or one for each step."""


@dataclass
class MtpEagleTrainingConfig(MtpTrainingConfig):
    """drafter=mtp_eagle: one module, used again at every step."""

    name: str = "mtp_eagle"


@dataclass
class FrozenKvTrainingConfig(UnrolledTrainingConfig):
    """drafter=frozen_kv: a Gemma 4 assistant, queries only."""

    name: str = "frozen_kv"
    hidden_size: int = width_of_layers(224)
    intermediate_size: int = width_of_feed_forward(256)
    num_heads: int = query_heads(4)
    kv_source_layers: list[int] = knob(
        [3, 5, 7],
        "layers of the target whose KV is read, one for each drafter layer; [] chooses some of an existing target such "
        "as hf",
        least=0,
    )


@dataclass
class DraftModelTrainingConfig(DraftLayerConfig, PackedTrainingConfig):
    """drafter=draft_model: a small, ordinary Qwen3 model."""

    name: str = "draft_model"
    hidden_size: int = width_of_layers(192)
    num_layers: int = depth(2)

    @property
    def num_trained_drafts(self) -> int:
        """More than any evaluation asks for: a draft depends only on the text before it, so any number is possible."""
        return 64
