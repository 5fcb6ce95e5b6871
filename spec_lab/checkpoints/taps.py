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


OFFSETS: Mapping[str, int] = {"layer_outputs": 0, "hidden_states": 1, "sglang": 0, "modelopt": 0}
"""What projects add to the number of a tap. DFlash, SpecForge, DeepSpec and ModelOpt number layer outputs. speculators
and vLLM number transformers' `hidden_states`, where 0 is the embedding. SGLang numbers layer outputs inside
`eagle_config`."""


def numbers_of(taps: Iterable[Tap], offset: int) -> list[int]:
    """Return the numbers of taps in a project that adds `offset`."""
    return [tap.decoder_layer_output + offset for tap in taps]


def refuse_taps(source: str, key: str, taps: Sequence[Tap], num_layers: int, count: int | None = None) -> None:
    """Raise UserError if taps are not `count` different ones in ascending order, or cannot be tapped.

    The last layer's output cannot be: taps are read as inputs of layers, and some projects norm this output.
    """
    possible = [Tap(output) for output in range(-1, num_layers - 1)]
    if sorted({*taps} & {*possible}) != [*taps] or len(taps) != (count or len(taps) or 1):
        raise UserError(
            f"{source}: {key} names the outputs of layers {numbers_of(taps, 0)}; it must name {count or 'some'} "
            f"different ones, in ascending order, of this target's {num_layers} layers without the last"
        )


def taps_of_inputs(layer_inputs: Iterable[int]) -> tuple[Tap, ...]:
    """Return the taps that are the inputs of these layers."""
    return tuple(Tap(layer - 1) for layer in layer_inputs)


def default_taps(num_target_layers: int, num_layers: int) -> tuple[Tap, ...]:
    """Return the default taps: as many as the body has layers, evenly spaced from the output of target layer 1 to that
    of layer `num_target_layers` - 3.

    A body of one layer taps the middle of the target. A target with few layers has fewer taps.
    """
    if num_layers == 1:
        return (Tap(num_target_layers // 2),)
    last = num_target_layers - 3
    outputs = {round(1 + (last - 1) * index / (num_layers - 1)) for index in range(num_layers)}
    return tuple(Tap(output) for output in sorted(outputs) if 0 <= output < num_target_layers - 1)
