"""What a training reads from the command line. The knobs of each head are in its file of `spec_lab.train.heads`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING


class Loss(StrEnum):
    """How a drafted row is compared with the target; p is the target's distribution, q the drafter's."""

    kl = "kl"  # cross-entropy of q against p
    ce = "ce"  # cross-entropy against the target's likeliest token
    tv = "tv"  # total variation, 1 - sum min(p, q)
    nla = "nla"  # -log of the overlap, sum min(p, q)
    lk = "lk"  # kl where they hardly overlap, tv where they do


class Optimiser(StrEnum):
    """`muon` is for the matrices of layers; everything else is AdamW's."""

    adamw = "adamw"
    muon = "muon"


@dataclass
class TargetChoice:
    """The model that a head is for: an option of `target=` of a run, with `target.path` if that needs one."""

    name: str = MISSING
    path: str | None = None


@dataclass
class TextsConfig:
    """The runs that the trainer makes itself if there is no `data`, or only a file of prompts.

    Attributes:
        num: prompts.
        max_prompt_tokens: longer prompts are left out.
        temperature: of the answers; 0 is greedy.
        prompt_temperature: of the prompts that the target writes.
        batch_size: texts that are written together.
        thinking: the switch of the chat template; null leaves it to the template.
    """

    num: int = 20_000
    max_prompt_tokens: int = 512
    max_new_tokens: int = 256
    temperature: float = 0.0
    prompt_temperature: float = 1.0
    batch_size: int = 256
    thinking: bool | None = None


@dataclass
class Optimisation:
    """How a head is trained.

    The learning rate rises linearly over `num_warmup_steps` and falls linearly to zero at `num_steps`. For a fixed
    number of tokens, that beats a decay to a tenth (Bergsma et al., 2025, "Straight to Zero"). With `max_seconds` it
    falls with the steps or with the seconds, whichever are further advanced.

    Attributes:
        batch_size: rows of `row_length` tokens in a step.
        weight_decay: on matrices only.
        max_grad_norm: longer gradients are scaled down to this length.
        checkpoint_every: steps between two checkpoints, from which a killed training continues.
        log_every: steps whose mean loss is one point of the curve.
        max_seconds: null is no limit.
    """

    optimiser: Optimiser = Optimiser.adamw
    num_steps: int = 20_000
    batch_size: int = 16
    peak_learning_rate: float = 1e-3
    num_warmup_steps: int = 200
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    checkpoint_every: int = 1000
    log_every: int = 100
    max_seconds: float | None = 420


@dataclass
class Evaluation:
    """The decoding of held-out prompts with the head while it is trained.

    Attributes:
        num_draft_tokens: K.
        every: steps between two decodings; there is one at the end too.
        num_prompts: held-out prompts, taken from their categories in turn.
    """

    num_draft_tokens: int = 3
    max_new_tokens: int = 256
    batch_size: int = 64
    every: int = 500
    num_prompts: int = 64


@dataclass
class TrainConfig:
    """A whole training. It writes into Hydra's folder, `hydra.run.dir`.

    Attributes:
        data: folders of runs (a glob), or a file of prompts that `workload=jsonl` or the package `datasets` reads. Null
            lets the target write its own prompts.
        held_out: folders of runs to measure on; null holds a share of the data out.
        row_length: tokens of a row, into which whole texts are packed; a longer text loses its end.
        device: auto, cpu, cuda or cuda:N.
        dtype: of the target, and of the head's products; weights of the head and moments are float32.
        layouts: of other projects, each written into a folder besides the head: `speculators` for `eagle3`, and
            `speculators` or `deepspec` for drafters of blocks.
        wandb: project to which figures are logged; null is none.
        plan: take a few steps, estimate the cost of all, and keep only texts that were written for it.
    """

    target: TargetChoice = MISSING
    drafter: Any = MISSING
    data: str | None = None
    held_out: str | None = None
    held_out_share: float = 0.01
    texts: TextsConfig = field(default_factory=TextsConfig)
    row_length: int = 1024
    optimisation: Optimisation = field(default_factory=Optimisation)
    evaluation: Evaluation = field(default_factory=Evaluation)
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    layouts: list[str] = field(default_factory=list)
    wandb: str | None = None
    plan: bool = False
