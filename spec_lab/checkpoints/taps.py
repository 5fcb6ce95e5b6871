"""Which hidden states of a target a head reads, and the four spellings of that which checkpoints use.

The same number means another layer in another project, and a wrong guess costs acceptance without any error. So inside
the lab a tap is named by the decoder layer whose output it is, and each spelling has a converter both ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Tap:
    """The output of a decoder layer, counted from 0; -1 is what enters layer 0."""

    decoder_layer_output: int

    @property
    def layer_input(self) -> int:
        """The layer that this enters, as `FeatureSpec.layer_inputs` counts."""
        return self.decoder_layer_output + 1


@dataclass(frozen=True, slots=True)
class TapSpelling:
    """How a project counts: its number is the layer's output plus `offset`."""

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
"""By who uses them: DFlash, SpecForge and DeepSpec count outputs; speculators and vLLM count transformers'
`hidden_states`, of which 0 is the embedding; SGLang adds 1 to what stands inside `eagle_config`; ModelOpt counts
outputs."""


def taps_of_inputs(layer_inputs: Iterable[int]) -> tuple[Tap, ...]:
    """Return the taps that enter these layers."""
    return tuple(Tap(layer - 1) for layer in layer_inputs)
