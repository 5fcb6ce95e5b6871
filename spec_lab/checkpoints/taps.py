"""Taps: the hidden states of a target that a head reads, and the two ways in which checkpoints count them.

The same number means different layers in different projects, and a wrong guess lowers acceptance without an error. So
the lab names a tap by the decoder layer whose output it is, and converts it from and to each project's numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spec_lab.core.errors import UserError


@dataclass(frozen=True, slots=True, order=True)
class Tap:
    """The output of a decoder layer, counted from 0; -1 is the input of layer 0."""

    decoder_layer_output: int

    @property
    def layer_input(self) -> int:
        """The layer whose input this is, as `FeatureSpec.layer_inputs` counts."""
        return self.decoder_layer_output + 1


@dataclass(frozen=True, slots=True)
class TapSpelling:
    """A project's way of counting: its number of a tap is `decoder_layer_output + offset`."""

    offset: int

    def read(self, numbers: Iterable[int]) -> tuple[Tap, ...]:
        return tuple(Tap(number - self.offset) for number in numbers)

    def write(self, taps: Iterable[Tap]) -> list[int]:
        return [tap.decoder_layer_output + self.offset for tap in taps]


SPELLINGS: Mapping[str, TapSpelling] = {
    "layer_outputs": TapSpelling(0),
    "hidden_states": TapSpelling(1),
    "sglang": TapSpelling(0),
    "modelopt": TapSpelling(0),
}
"""The offsets of the projects. DFlash, SpecForge, DeepSpec and ModelOpt number layer outputs. speculators and vLLM
number transformers' `hidden_states`, where 0 is the embedding. SGLang numbers layer outputs inside `eagle_config`."""


def refuse_taps(source: str, key: str, taps: Sequence[Tap], num_layers: int, count: int | None = None) -> None:
    """Raise UserError if taps are not `count` different ones in ascending order, or cannot be tapped.

    The last layer's output cannot be: taps are read as inputs of layers, and some projects norm this output.
    """
    outputs = [tap.decoder_layer_output for tap in taps]
    problem = None
    if count is not None and len(set(outputs)) != count:
        problem = f"names {len(set(outputs))} layers, and only heads that read {count} are supported"
    elif not outputs or outputs != sorted(set(outputs)) or outputs[0] < -1 or outputs[-1] >= num_layers:
        problem = f"does not name different layers of this target in ascending order; it has {num_layers} layers"
    elif outputs[-1] == num_layers - 1:
        problem = "names the output of the target's last layer, which cannot be tapped"
    if problem:
        raise UserError(f"{source}: {key} {problem}")


def taps_of_inputs(layer_inputs: Iterable[int]) -> tuple[Tap, ...]:
    """Return the taps that are the inputs of these layers."""
    return tuple(Tap(layer - 1) for layer in layer_inputs)
