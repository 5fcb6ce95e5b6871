"""Taps: the hidden states of a target that a head reads, and the two ways in which checkpoints count them.

The same number means different layers in different projects, and a wrong guess lowers acceptance without an error. So
the lab names a tap by the decoder layer whose output it is, and converts it from and to each project's numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


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


def taps_of_inputs(layer_inputs: Iterable[int]) -> tuple[Tap, ...]:
    """Return the taps that are the inputs of these layers."""
    return tuple(Tap(layer - 1) for layer in layer_inputs)
