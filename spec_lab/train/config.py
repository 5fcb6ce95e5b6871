"""The schema of a training: a dataclass for each group of keys, with types, defaults, explanations and bounds.

It holds only values, and does not import torch. The options of `target=` and `drafter=` are in `target_config.py`,
`drafter_config.py` and `block_config.py`. A YAML file in `conf/train/target/` or `conf/train/drafter/` names its schema
in its defaults list, and sets the values that the option changes. `spec_lab.train.checks` has the rules on
combinations, and `spec_lab.train.options` the recipe of each drafter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from spec_lab.corpus.example import SPECIAL_TOKENS
from spec_lab.menu.choices import Dtype, LoggerMode
from spec_lab.menu.config import knob
from spec_lab.train.drafter_config import DrafterChoice, DrafterTrainingConfig
from spec_lab.train.module_config import MAX_LENGTH, MAX_VOCAB_SIZE
from spec_lab.train.target_config import NewTargetConfig, TargetChoice
from spec_lab.train.texts.settings import PROMPTS, WritingConfig

MAX_SEED = 2**31 - 1
MAX_TEXTS = 10**7


@dataclass
class TokenizerConfig:
    """The texts that a new vocabulary is trained on: examples of each checkable category, and natural text."""

    vocab_size: int = knob(4096, "tokens, markers included", least=256 + len(SPECIAL_TOKENS), most=MAX_VOCAB_SIZE)
    num_examples_per_category: int = knob(1500, "generated examples for a new vocabulary", least=1, most=MAX_TEXTS)


@dataclass
class CorpusConfig:
    """The texts that a new target is trained on: generated examples of each checkable category, and natural text."""

    num_examples_per_category: int = knob(
        90000, "generated examples for a new target, rounded up to whole shards", least=1, most=MAX_TEXTS
    )
    num_shards: int = knob(
        64, "number of parts of the examples; a process draws each from a separate seed", least=1, most=2**16
    )
    row_length: int = knob(512, "tokens of a row, into which whole examples are packed", least=16, most=MAX_LENGTH)
    num_natural_documents: int | None = knob(
        None,
        "number of the standard library's documents for a new target: files, then prose; null is all for training",
        least=1,
    )


@dataclass
class GenerationsConfig:
    """The texts that target=pocket and target=shipped write for their drafters to learn from."""

    num_checkable_prompts: int = knob(
        3500,
        "prompts of each checkable category that the target answers, rounded up to whole shards",
        least=0,
        most=MAX_TEXTS,
    )
    num_natural_prompts: int = knob(
        10000,
        "prompts of code, and as many of prose, that the target continues, rounded up to whole shards",
        least=0,
        most=MAX_TEXTS,
    )
    num_shards: int = knob(
        16, "number of parts of the prompts; a process draws each from a separate seed", least=1, most=2**16
    )
    max_new_tokens: int = knob(256, "most tokens that the target writes after each prompt", least=1, most=MAX_LENGTH)
    row_length: int = knob(
        321, "tokens of a prompt and its text together; prompts that fill it are left out", least=16, most=MAX_LENGTH
    )
    batch_size: int = knob(4096, "prompts continued together", least=1, most=2**20)
    sampled_fraction: float = knob(0.2, "share of the texts that is sampled; the others are greedy", least=0, most=1)
    temperature: float = knob(1.0, "of the sampled texts", least=0.01, most=100)


@dataclass
class PackingConfig:
    """Texts of a folder, packed into rows."""

    row_length: int = knob(1024, "tokens of a row; a longer text loses its end", least=16)
    kept_gigabytes: float = knob(
        0, "CPU memory for hidden states; rows whose states fit are run by the target once, not in every epoch", least=0
    )
    held_out: float = knob(0.01, "share of the conversations that a drafter is measured on", above=0, most=0.5)


@dataclass
class EvaluationConfig:
    """The measurement of the card's figures, on the shipped prompts or, for a target such as hf, on held-out ones."""

    num_draft_tokens: int = knob(3, "K of the acceptance length on the card", least=1, most=16)
    max_new_tokens: int = knob(256, "tokens after each prompt", least=1, most=MAX_LENGTH)
    batch_size: int = knob(1024, "prompts continued together", least=1, most=2**20)
    every: int = knob(
        500, "steps between two decodings of held-out prompts, for an existing target such as hf", least=1
    )
    rows_per_forward: int = knob(64, "texts that are measured together", least=1, most=2**20)
    limit_per_category: int | None = knob(None, "number of prompts of each category; null is all", least=1)
    samples_per_category: int = knob(
        3, "number of texts of each category that are written to a file for reading", least=0
    )
    prompts: list[str] = knob(
        [], "question files that the card measures by category, such as Spec-Bench's; for an existing target such as hf"
    )


@dataclass
class TrackingConfig:
    """The W&B settings of a training."""

    project: str | None = knob(None, "W&B project to which the training logs figures; null is none")
    entity: str | None = knob(None, "W&B user or team; null is the one of the key")
    mode: LoggerMode = knob(LoggerMode.auto, "where W&B's records go")


@dataclass
class TrainConfig:
    """A whole training. `debug` is not part of it, since it only sets other keys."""

    drafter: DrafterChoice = knob(MISSING, "the drafter to train")
    target: TargetChoice = knob(MISSING, "the target that the drafter is trained for")
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig, metadata={"help": "a new target's vocabulary"})
    corpus: CorpusConfig = field(default_factory=CorpusConfig, metadata={"help": "what a new target learns from"})
    generations: GenerationsConfig = field(
        default_factory=GenerationsConfig, metadata={"help": "what the drafter learns from"}
    )
    texts: str | None = knob(
        None,
        "folder that python -m spec_lab.train.texts wrote, for an existing target such as hf; if null, texts are first "
        "written into output_dir/texts",
    )
    prompts: list[str] = knob([], PROMPTS)
    writing: WritingConfig = field(
        default_factory=WritingConfig, metadata={"help": "how an existing target such as hf writes its texts"}
    )
    packing: PackingConfig = field(default_factory=PackingConfig, metadata={"help": "how a folder's texts become rows"})
    evaluation: EvaluationConfig = field(
        default_factory=EvaluationConfig, metadata={"help": "the measurement of the card's figures"}
    )
    logger: TrackingConfig = field(
        default_factory=TrackingConfig, metadata={"help": "W&B, for an existing target such as hf"}
    )
    layouts: list[str] = knob(
        [],
        "other projects' layouts to write too, each in a subfolder of the drafter: speculators for eagle3, "
        "speculators and deepspec for dflash and its presets, as far as the layout has their parts",
    )
    seed: int = knob(0, "seed of weights, examples and batches", least=0, most=MAX_SEED)
    device: str = knob("auto", "auto, cpu, cuda or cuda:N; auto takes a GPU if there is one")
    dtype: Dtype = knob(
        Dtype.auto,
        "dtype of an existing target such as hf, and of its drafter's products; float16 is refused",
    )
    num_workers: int | None = knob(
        None, "number of processes that prepare text; null is one for each core", least=1, most=1024
    )
    output_dir: str = knob(
        "outputs/train",
        "folder for all results, from which the same command continues; targets other than pocket set their own",
    )

    @property
    def trained_drafter(self) -> DrafterTrainingConfig | None:
        """The drafter to train; None if none is trained."""
        return self.drafter.to_train()

    @property
    def trained_target(self) -> NewTargetConfig | None:
        """The target to train; None if an existing one is used."""
        return self.target.to_train()
