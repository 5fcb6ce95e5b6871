"""The schema of a training: one dataclass per Hydra option, with type, default, explanation and bounds of every key.

Values only, and no torch. A YAML under `conf/train/` names its schema in its defaults list and sets what that option
changes. What may be combined with what stands in `spec_lab.train.checks`, and what trains a drafter in its row, in
`spec_lab.train.options`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from spec_lab.config import knob
from spec_lab.corpus.example import SPECIAL_TOKENS

MAX_SEED = 2**31 - 1
MAX_LENGTH = 2048
"""Positions of a target that is trained here."""
MAX_VOCAB_SIZE = 2**15
"""Token ids are kept as int16."""
MAX_TEXTS = 10**7


def width_of_layers(default: int) -> Any:
    return knob(default, "width of the layers", least=1, most=2**16)


def width_of_feed_forward(default: int) -> Any:
    return knob(default, "width of the feed-forward network", least=1, most=2**18)


def depth(default: int) -> Any:
    return knob(default, "depth", least=1, most=1024)


def query_heads(default: int) -> Any:
    return knob(default, "query heads of a layer, a multiple of its key-value heads", least=1, most=1024)


@dataclass
class LayerConfig:
    """A layer with keys and values of its own."""

    intermediate_size: int = width_of_feed_forward(512)
    num_heads: int = query_heads(4)
    num_kv_heads: int = knob(2, "key-value heads of a layer", least=1, most=1024)
    head_dim: int = knob(64, "width of a head, an even number", least=2, most=1024)


@dataclass
class OptimisationConfig:
    """The way in which AdamW trains a module.

    The learning rate rises linearly over `num_warmup_steps` and falls linearly to zero at `num_steps`: for a fixed
    number of tokens, decay to zero beats decay to a tenth (Bergsma et al., 2025, "Straight to Zero").
    """

    num_steps: int = knob(8000, "training steps", least=2, most=10**9)
    batch_size: int = knob(96, "rows a step", least=1, most=2**20)
    peak_learning_rate: float = knob(2e-3, "reached after the warm-up, then linearly to zero", above=0, most=1)
    num_warmup_steps: int = knob(200, "steps over which the learning rate rises", least=1)
    weight_decay: float = knob(0.05, "AdamW's, on matrices only", least=0, most=1)
    max_grad_norm: float = knob(1.0, "gradients longer than this are shortened to it", above=0)
    checkpoint_every: int = knob(1000, "steps after which an interrupted training goes on", least=1)
    log_every: int = knob(500, "steps that a point of the loss curve is the mean of", least=1)


@dataclass
class TargetChoice:
    """The keys that every option of `target` has: none."""

    def to_train(self) -> PocketTrainingConfig | None:
        """The target as it is trained; None where it is taken as it lies."""
        return None


@dataclass
class ShippedTarget(TargetChoice):
    """target=shipped: the one in `spec_lab/zoo/pocket`, as it lies."""


@dataclass
class PocketTrainingConfig(LayerConfig, TargetChoice):
    """target=pocket: a new target of the Qwen3 architecture."""

    hidden_size: int = width_of_layers(256)
    num_layers: int = depth(8)
    natural_fraction: float = knob(
        0.08, "share of code and prose in a batch; the rest are generated examples", least=0, most=1
    )
    optimisation: OptimisationConfig = field(default_factory=OptimisationConfig, metadata={"help": "how it is trained"})

    def to_train(self) -> PocketTrainingConfig:
        return self


@dataclass
class DrafterChoice:
    """The keys that every option of `drafter` has."""

    name: str = MISSING

    def to_train(self) -> DrafterTrainingConfig | None:
        """The drafter as it is trained; None where there is none."""
        return None


@dataclass
class NoDrafterChoice(DrafterChoice):
    """drafter=none: nothing is drafted."""

    name: str = "none"


@dataclass
class DrafterTrainingConfig(DrafterChoice):
    """The keys that every drafter that is trained has."""

    optimisation: OptimisationConfig = field(default_factory=OptimisationConfig, metadata={"help": "how it is trained"})

    def to_train(self) -> DrafterTrainingConfig:
        return self


@dataclass
class UnrolledTrainingConfig(DrafterTrainingConfig):
    """The keys of a drafter that is unrolled over its steps: step i counts `step_loss_decay ** i`."""

    num_unrolled_steps: int = knob(5, "draft steps that training unrolls", least=1, most=64)
    step_loss_decay: float = knob(0.8, "weight of a step's loss beside that of the step before", least=0, most=1)


@dataclass
class Eagle3TrainingConfig(LayerConfig, UnrolledTrainingConfig):
    """drafter=eagle3: a one-layer EAGLE-3 head."""

    name: str = "eagle3"
    draft_vocab_size: int = knob(
        2048,
        "tokens that can be drafted: those the target writes most",
        least=len(SPECIAL_TOKENS),
        most=MAX_VOCAB_SIZE,
    )


@dataclass
class MtpTrainingConfig(LayerConfig, UnrolledTrainingConfig):
    """Multi-token prediction modules. One is used again at each unrolled step; of several each takes one step."""

    num_modules: int = knob(1, "MTP modules; 1 is used again at every step", least=1, most=64)


@dataclass
class MtpEagleTrainingConfig(MtpTrainingConfig):
    """drafter=mtp_eagle: one module, used again at every step."""

    name: str = "mtp_eagle"


@dataclass
class MtpVanillaTrainingConfig(MtpTrainingConfig):
    """drafter=mtp_vanilla: a module for each draft."""

    name: str = "mtp_vanilla"


@dataclass
class FrozenKvTrainingConfig(UnrolledTrainingConfig):
    """drafter=frozen_kv: a Gemma 4 assistant, queries only."""

    name: str = "frozen_kv"
    hidden_size: int = width_of_layers(224)
    intermediate_size: int = width_of_feed_forward(256)
    num_heads: int = query_heads(4)
    kv_source_layers: list[int] = knob([3, 5, 7], "layers of the target whose KV is read, one a drafter layer", least=0)


@dataclass
class DraftModelTrainingConfig(LayerConfig, DrafterTrainingConfig):
    """drafter=draft_model: an ordinary Qwen3 model, small."""

    name: str = "draft_model"
    hidden_size: int = width_of_layers(192)
    num_layers: int = depth(2)
    prompt_loss_weight: float = knob(
        0.1, "weight of a prompt's tokens in the loss beside what the target wrote", least=0, most=1
    )


@dataclass
class TokenizerConfig:
    """Holds what a new vocabulary is learnt from: examples of each checkable category, and the natural text."""

    vocab_size: int = knob(4096, "tokens, markers included", least=256 + len(SPECIAL_TOKENS), most=MAX_VOCAB_SIZE)
    num_examples_per_category: int = knob(1500, "generated examples it is learnt from", least=1, most=MAX_TEXTS)


@dataclass
class CorpusConfig:
    """Holds what a new target learns from: generated examples of each checkable category, and natural text."""

    num_examples_per_category: int = knob(90000, "generated examples for a new target", least=1, most=MAX_TEXTS)
    num_shards: int = knob(
        64, "parts of the examples, each drawn by one process from a seed of its own", least=1, most=2**16
    )
    row_length: int = knob(512, "tokens a row that whole examples are packed into", least=16, most=MAX_LENGTH)
    num_natural_documents: int | None = knob(
        None, "files of the standard library for a new target; null: all of the training split", least=1
    )


@dataclass
class GenerationsConfig:
    """The target's own texts, which drafters learn from."""

    num_checkable_prompts: int = knob(
        3500, "prompts of each checkable category that the target answers for the drafter", least=0, most=MAX_TEXTS
    )
    num_natural_prompts: int = knob(
        10000, "prompts of code and of prose that it continues for the drafter", least=0, most=MAX_TEXTS
    )
    num_shards: int = knob(
        16, "parts of the prompts, each drawn by one process from a seed of its own", least=1, most=2**16
    )
    max_new_tokens: int = knob(256, "tokens it writes after each", least=1, most=MAX_LENGTH)
    row_length: int = knob(
        321, "tokens of a prompt and its text that are kept; longer prompts are left out", least=16, most=MAX_LENGTH
    )
    batch_size: int = knob(4096, "prompts continued together", least=1, most=2**20)
    sampled_fraction: float = knob(0.2, "share of the texts that is sampled; the others are greedy", least=0, most=1)
    temperature: float = knob(1.0, "of the sampled texts", least=0.01, most=100)


@dataclass
class EvaluationConfig:
    """Holds what the card's figures are measured on: the shipped prompts."""

    num_draft_tokens: int = knob(3, "K of the acceptance length on the card", least=1, most=16)
    max_new_tokens: int = knob(256, "tokens after each prompt", least=1, most=MAX_LENGTH)
    batch_size: int = knob(1024, "prompts continued together", least=1, most=2**20)
    rows_per_forward: int = knob(64, "texts that are measured together", least=1, most=2**20)
    limit_per_category: int | None = knob(None, "prompts of each category it is measured on; null: all", least=1)
    samples_per_category: int = knob(3, "texts of each category that are kept to be read", least=0)


@dataclass
class TrainConfig:
    """A whole training. `debug` only sets other keys, so it is no part of it."""

    drafter: DrafterChoice = knob(MISSING, "what is trained, on texts that the target writes")
    target: TargetChoice = knob(MISSING, "what it is trained for")
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig, metadata={"help": "a new target's vocabulary"})
    corpus: CorpusConfig = field(default_factory=CorpusConfig, metadata={"help": "what a new target learns from"})
    generations: GenerationsConfig = field(
        default_factory=GenerationsConfig, metadata={"help": "what the drafter learns from"}
    )
    evaluation: EvaluationConfig = field(
        default_factory=EvaluationConfig, metadata={"help": "what the card's figures are measured on"}
    )
    seed: int = knob(0, "of weights, examples and batches", least=0, most=MAX_SEED)
    device: str = knob("auto", "auto, cpu, cuda or cuda:N; auto takes a GPU if there is one")
    num_workers: int | None = knob(None, "processes that prepare text; null: one a core", least=1, most=1024)
    output_dir: str = knob(
        "outputs/train", "where all is kept and the same command goes on; target=shipped: outputs/train-drafters"
    )

    @property
    def trained_drafter(self) -> DrafterTrainingConfig | None:
        """The drafter, None where there is none to train."""
        return self.drafter.to_train()

    @property
    def trained_target(self) -> PocketTrainingConfig | None:
        """The target, None where the shipped one is taken as it lies."""
        return self.target.to_train()
