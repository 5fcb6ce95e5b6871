"""The schema of a training: one dataclass per Hydra option, with type, default, explanation and bounds of every key.

Values only, and no torch. A YAML under `conf/train/` names its schema in its defaults list and sets what that option
changes. What may be combined with what stands in `spec_lab.train.checks`, and what trains a drafter in its row, in
`spec_lab.train.options`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

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

    def most_seconds(self) -> float | None:
        """The clock that ends the training too; None where steps alone do."""
        return None


@dataclass
class TimedOptimisationConfig(OptimisationConfig):
    """The same, ended by the clock too: the rate falls with whichever is further on, steps or seconds."""

    max_seconds: float | None = knob(None, "the clock that ends the training too; null: steps alone do", above=0)

    def most_seconds(self) -> float | None:
        return self.max_seconds


@dataclass
class TargetChoice:
    """The keys that every option of `target` has: none."""

    writes_texts: ClassVar[bool] = True
    """Drafters learn on texts that the target writes; else on the corpus that it learnt on."""
    own_vocabulary: ClassVar[bool] = True
    """A new target has a vocabulary of its own; else the shipped one's."""

    def to_train(self) -> NewTargetConfig | None:
        """The target as it is trained; None where it is taken as it lies."""
        return None


@dataclass
class ShippedTarget(TargetChoice):
    """target=shipped: the one in `spec_lab/zoo/pocket`, as it lies."""


@dataclass
class NewTargetConfig(TargetChoice):
    """The keys that every target has that is trained here."""

    option: ClassVar[str]
    """The name of the option, and of the folder that the target is saved to."""

    hidden_size: int = width_of_layers(192)
    num_layers: int = depth(8)
    natural_fraction: float = knob(
        0.08, "share of code and prose in a batch; the rest are generated examples", least=0, most=1
    )
    optimisation: OptimisationConfig = field(default_factory=OptimisationConfig, metadata={"help": "how it is trained"})

    def to_train(self) -> NewTargetConfig:
        return self

    def key_value_heads(self) -> int:
        """Heads that have keys and values of their own."""
        return int(getattr(self, "num_kv_heads", 1))


@dataclass
class PocketTrainingConfig(LayerConfig, NewTargetConfig):
    """target=pocket: a new target of the Qwen3 architecture."""

    option: ClassVar[str] = "pocket"

    hidden_size: int = width_of_layers(256)


@dataclass
class DecoderTrainingConfig(NewTargetConfig):
    """The keys of targets of other families. Their drafters learn on the corpus, not on texts that the target wrote."""

    writes_texts: ClassVar[bool] = False
    own_vocabulary: ClassVar[bool] = False

    drafter_natural_fraction: float = knob(0.4, "share of code and prose in a batch of the drafter's", least=0, most=1)
    optimisation: TimedOptimisationConfig = field(
        default_factory=TimedOptimisationConfig, metadata={"help": "how it is trained"}
    )


@dataclass
class PocketHybridTrainingConfig(LayerConfig, DecoderTrainingConfig):
    """target=pocket_hybrid: a new target of the Qwen3.5 architecture, mostly gated delta nets."""

    option: ClassVar[str] = "pocket_hybrid"

    full_attention_every: int = knob(4, "of so many layers the last has attention, the others delta nets", least=1)
    num_key_heads: int = knob(2, "heads of a delta net's queries and keys", least=1, most=1024)
    num_value_heads: int = knob(4, "heads of its values, a multiple of num_key_heads", least=1, most=1024)
    key_head_dim: int = knob(32, "width of such a head of keys", least=1, most=1024)
    value_head_dim: int = knob(64, "width of such a head of values", least=1, most=1024)


@dataclass
class PocketGemmaTrainingConfig(LayerConfig, DecoderTrainingConfig):
    """target=pocket_gemma: a new target of the Gemma 4 architecture, of the kind of E2B."""

    option: ClassVar[str] = "pocket_gemma"

    full_attention_every: int = knob(4, "of so many layers the last sees all, the others a window", least=1)
    full_head_dim: int = knob(64, "width of a head in the layers that see all, an even number", least=2, most=1024)
    window: int = knob(64, "keys that the other layers see", least=1, most=MAX_LENGTH)
    num_shared_layers: int = knob(4, "layers, the last ones, that read the KV of earlier ones", least=0, most=1023)
    per_layer_width: int = knob(16, "width of the embedding that each layer has of its own", least=1, most=2**16)


@dataclass
class PocketMoeTrainingConfig(DecoderTrainingConfig):
    """target=pocket_moe: a new target of the DeepSeek-V3 architecture, with experts and latent attention."""

    option: ClassVar[str] = "pocket_moe"

    intermediate_size: int = knob(384, "width of the first layer's feed-forward network", least=1, most=2**18)
    num_heads: int = knob(4, "heads of a layer", least=1, most=1024)
    kv_lora_rank: int = knob(64, "latent numbers that are cached of a token", least=1, most=2**14)
    qk_nope_head_dim: int = knob(32, "channels of a query that meet the latent numbers", least=1, most=1024)
    qk_rope_head_dim: int = knob(16, "channels of a query that turn, an even number", least=2, most=1024)
    v_head_dim: int = knob(32, "width of a head's values", least=1, most=1024)
    num_experts: int = knob(16, "experts of a layer behind the first", least=2, most=1024)
    num_chosen: int = knob(2, "of which a token goes through so many", least=1, most=1024)
    expert_size: int = knob(40, "width of an expert, and of the one that all tokens go through", least=1, most=2**16)


@dataclass
class DrafterChoice:
    """The keys that every option of `drafter` has."""

    name: str = MISSING

    def to_train(self) -> DrafterTrainingConfig | None:
        """The drafter as it is trained; None where there is none."""
        return None

    @property
    def drafts_as(self) -> str:
        """The option of a run that takes its weights; their folder is named after it."""
        return self.name


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
class NextnTrainingConfig(UnrolledTrainingConfig):
    """drafter=nextn: an MTP module whose layer is of its target's own kind, as Qwen3.5 and DeepSeek-V3 have them."""

    name: str = "nextn"
    intermediate_size: int = knob(208, "width of a dense feed-forward network; experts are the target's", least=1)
    optimisation: TimedOptimisationConfig = field(
        default_factory=TimedOptimisationConfig, metadata={"help": "how it is trained"}
    )

    @property
    def drafts_as(self) -> str:
        return "mtp_eagle"


@dataclass
class AssistantTrainingConfig(UnrolledTrainingConfig):
    """drafter=assistant: a Gemma 4 assistant over the last layers of each kind that own their KV."""

    name: str = "assistant"
    hidden_size: int = width_of_layers(96)
    intermediate_size: int = width_of_feed_forward(192)
    num_heads: int = query_heads(4)
    num_sliding_layers: int = knob(2, "layers with a window; one that sees all follows", least=0, most=64)
    optimisation: TimedOptimisationConfig = field(
        default_factory=TimedOptimisationConfig, metadata={"help": "how it is trained"}
    )

    @property
    def drafts_as(self) -> str:
        return "frozen_kv"


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
    def trained_target(self) -> NewTargetConfig | None:
        """The target, None where the shipped one is taken as it lies."""
        return self.target.to_train()
