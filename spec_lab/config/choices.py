"""Enumerations: the fixed sets of values of knobs."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Choice(StrEnum):
    """A fixed set of values of a knob. A member's name is what the user types, and its `help` explains it."""

    help: str

    def __new__(cls, value: str, explanation: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.help = explanation
        return member


class Dtype(Choice):
    """The types that weights and activations can be kept in."""

    auto = "auto", "float32 on a CPU, else bfloat16"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class KernelsChoice(Choice):
    """The kinds of kernels that can compute the small steps of a round; triton and native also compute layers."""

    auto = (
        "auto",
        "triton on a CUDA device, native on a CPU with a C compiler, if the run can use it; else torch",
    )
    torch = "torch"
    triton = "triton", "a GPU, or TRITON_INTERPRET=1"
    native = "native", "C compiled for this CPU; one thread unless num_threads is set, float32, chains"


class ReferenceChoice(Choice):
    """The references that can be measured with a run."""

    plain = "plain", "no drafter"
    unpruned = "unpruned", "no pruning"
    eager = "eager", "no graph"


class LoggerMode(Choice):
    """The places where W&B's records can go."""

    auto = "auto", "WANDB_MODE if set, else online with a key, else offline"
    online = "online"
    offline = "offline"
    disabled = "disabled"


class Unusable(Choice):
    """The ways to treat a prompt of a file that cannot be used."""

    refuse = "refuse", "the run does not begin"
    skip = "skip", "the prompt is left out, with a message"


class Weights(Choice):
    """The sources of a model's weights."""

    checkpoint = "checkpoint"
    random = "random", "made on the device, for speed studies; only config.json is read"


class WeightDtype(Choice):
    """The types that the weights of a target can be kept in."""

    auto = "auto", "dtype"
    fp8 = "fp8", "products of layers in e4m3 with a float32 scale for each block of 128 x 128"
    int4 = "int4", "products of layers in 4-bit integers with a multiplier and a zero point a group of 128 inputs"
    mxfp4 = "mxfp4", "products of layers in 4-bit floats with a power of two a group of 32 inputs"
    bfloat16 = "bfloat16", "products of layers, embedding and head; for kernels=native, which computes in float32"


class CacheDtype(Choice):
    """The types that keys and values can be kept in."""

    auto = "auto", "dtype"
    fp8 = "fp8", "e4m3 with a power of two for each head of each token"


class Rollback(Choice):
    """The ways to undo rejected drafts in layers that keep a state."""

    checkpoints = "checkpoints", "a state after each verify row; an index selects the one to continue from"
    replay = "replay", "one state; the next round repeats the accepted rows"


class DraftSampling(Choice):
    """The ways to pick drafts."""

    greedy = "greedy"
    distribution = "distribution", "at sampling.temperature"


class DraftMetadata(Choice):
    """The ways to update attention metadata between the draft steps of a graph."""

    in_place = "in_place"
    stale = "stale", "wrong on purpose"


class RelaxedPhase(Choice):
    """The parts of a text in which relaxed acceptance is on."""

    token = "token", "by the markers before each token"
    round = "round", "by those before the round, as TensorRT-LLM"
