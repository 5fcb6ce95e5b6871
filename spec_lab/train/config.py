"""The schema of a training: a dataclass for each group of keys, with types, defaults, explanations and bounds.

It holds only values, and does not import torch. The options of `target=` and `drafter=` are in `target_config.py`,
`drafter_config.py` and `block_config.py`. A YAML file in `conf/train/target/` or `conf/train/drafter/` names its schema
in its defaults list, and sets the values that the option changes. `spec_lab.train.checks` has the rules on
combinations, and `spec_lab.train.options` the recipe of each drafter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from spec_lab.menu.choices import Dtype, LoggerMode
from spec_lab.menu.config import knob
from spec_lab.train.drafter_config import PackedTrainingConfig
from spec_lab.train.module_config import MAX_LENGTH
from spec_lab.train.target_config import TargetChoice
from spec_lab.train.texts.settings import PROMPTS, WritingConfig

MAX_SEED = 2**31 - 1


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
    """The measurement of the card's figures, on held-out prompts."""

    num_draft_tokens: int = knob(3, "K of the acceptance length on the card", least=1, most=16)
    max_new_tokens: int = knob(256, "tokens after each prompt", least=1, most=MAX_LENGTH)
    batch_size: int = knob(1024, "prompts continued together", least=1, most=2**20)
    every: int = knob(500, "steps between two decodings of held-out prompts", least=1)
    limit_per_category: int | None = knob(None, "number of prompts of each category; null is all", least=1)
    prompts: list[str] = knob([], "question files that the card measures by category, such as Spec-Bench's")


@dataclass
class TrackingConfig:
    """The W&B settings of a training."""

    project: str | None = knob(None, "W&B project to which the training logs figures; null is none")
    entity: str | None = knob(None, "W&B user or team; null is the one of the key")
    mode: LoggerMode = knob(LoggerMode.auto, "where W&B's records go")


@dataclass
class TrainConfig:
    """A whole training. `debug` is not part of it, since it only sets other keys."""

    drafter: PackedTrainingConfig = knob(MISSING, "the drafter to train")
    target: TargetChoice = knob(MISSING, "the target that the drafter is trained for")
    texts: str | None = knob(
        None,
        "folder that python -m spec_lab.train.texts wrote; if null, texts are first written into output_dir/texts",
    )
    prompts: list[str] = knob([], PROMPTS)
    writing: WritingConfig = field(default_factory=WritingConfig, metadata={"help": "how the target writes its texts"})
    packing: PackingConfig = field(default_factory=PackingConfig, metadata={"help": "how a folder's texts become rows"})
    evaluation: EvaluationConfig = field(
        default_factory=EvaluationConfig, metadata={"help": "the measurement of the card's figures"}
    )
    logger: TrackingConfig = field(default_factory=TrackingConfig, metadata={"help": "W&B"})
    layouts: list[str] = knob(
        [],
        "other projects' layouts to write too, each in a subfolder of the drafter: speculators for eagle3, "
        "speculators and deepspec for dflash and its presets, as far as the layout has their parts",
    )
    seed: int = knob(0, "seed of weights, examples and batches", least=0, most=MAX_SEED)
    device: str = knob("auto", "auto, cpu, cuda or cuda:N; auto takes a GPU if there is one")
    dtype: Dtype = knob(
        Dtype.auto,
        "dtype of the target, and of the drafter's products; float16 is refused",
    )
    output_dir: str = knob(
        "outputs/train",
        "folder for all results, from which the same command continues",
    )
