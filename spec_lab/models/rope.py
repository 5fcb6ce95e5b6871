"""Rotary position embeddings, in the rotate-half layout of the Hugging Face checkpoints: their tables and the rotation.

Sources: RoFormer (Su et al. 2021); linear position interpolation (Chen et al. 2023); the frequency-dependent scaling of
Llama 3.1; Gemma 4's "proportional" embedding, which rotates the first pairs of the whole head; YaRN (Peng et al. 2023,
arXiv 2309.00071); LongRoPE (arXiv 2402.13753); dynamic NTK, as vLLM has it.

LongRoPE and dynamic NTK have other frequencies past the original length. transformers changes them when a sequence gets
there, and leaves the keys in the cache as they are. A table here has one set for all its positions: the original one
if it ends within the original length, else that of the whole extended length.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from spec_lab.checkpoints.plan import RopeConfig
from spec_lab.core.passes import Pass, RotaryRows


class RotaryTable:
    """Cos and sin of every position, in the rotate-half layout [max_positions, rotary_dim].

    Attributes:
        rows_of_positions: [max_positions, 2, rotary_dim] cos and signed sin.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        half = sin.shape[-1] // 2
        self.rows_of_positions = torch.stack((cos, torch.cat((-sin[:, :half], sin[:, half:]), dim=1)), dim=1)

    def rows(self, positions: torch.Tensor) -> RotaryRows:
        """Gather the rows for `positions` [rows]."""
        cos, signed_sin = self.rows_of_positions.index_select(0, positions).unsqueeze(2).unbind(1)
        return RotaryRows(cos, signed_sin)

    def turning(self, at: Pass) -> Pass:
        """Return the pass with the rotation of its rows."""
        return replace(at, rotary=self.rows(at.metadata.positions))


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_positions: int = 0) -> torch.Tensor:
    """Return the rotation of each pair of channels in radians per position, [rotary_dim / 2] float32, in a table of
    `max_positions`."""
    if rope.scaling == "proportional":
        # The exponents are of the whole head; pairs past the rotated part are not rotated.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        turns = torch.arange(head_dim // 2) < int(rope.partial_rotary_factor * head_dim // 2)
        return torch.where(turns, 1.0 / rope.theta**exponents, 0.0)
    rotary_dim = int(head_dim * rope.partial_rotary_factor)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    is_long = max_positions > rope.original_max_position_embeddings
    match rope.scaling:
        case "none":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "dynamic":
            # The base for a length of `factor` times the original one.
            growth = rope.factor**2 - (rope.factor - 1)
            theta = rope.theta * growth ** (rotary_dim / (rotary_dim - 2))
            return 1.0 / (theta**exponents) if is_long else frequencies
        case "longrope":
            return frequencies / torch.tensor(rope.long_divisors if is_long else rope.short_divisors)
        case "llama3":
            return _llama3_frequencies(frequencies, rope)
        case "yarn":
            return _yarn_frequencies(frequencies, rope)


def _llama3_frequencies(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Divide low frequencies by `factor`, keep high ones, and blend those between by their number of turns."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelengths
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn_frequencies(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Keep frequencies of many turns within the original positions, divide low ones by `factor`, and blend those
    between by the index of the pair."""
    num_pairs = len(frequencies)
    # The wavelengths of the pairs that turn so often within the original positions; the pairs follow from them.
    wavelengths = (
        rope.original_max_position_embeddings / (turns * 2 * math.pi) for turns in (rope.beta_fast, rope.beta_slow)
    )
    first, last = (num_pairs * math.log(wavelength) / math.log(rope.theta) for wavelength in wavelengths)
    if rope.whole_channels:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    width = last - first or 0.001
    divided = ((torch.arange(num_pairs, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return frequencies / rope.factor * divided + frequencies * (1 - divided)


def rotary_table(
    rope: RopeConfig, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device | str
) -> RotaryTable:
    """Make the rotary table of `rope` for heads of `head_dim` channels."""
    return RotaryTable(*rope_tables(rope, head_dim, max_positions, dtype, device))


def rope_tables(
    rope: RopeConfig, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, times `rope.amplitude`, of the positions 0..max_positions - 1.

    Each is [max_positions, rotary_dim].

    Channels i and i + rotary_dim / 2 are a pair and have the same angle. Angles are always computed in float32 on the
    CPU, so that every device has the same table.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim, max_positions)).repeat(1, 2)
    tables = (rope.amplitude * table for table in (angles.cos(), angles.sin()))
    cos, sin = (table.to(device=device, dtype=dtype) for table in tables)
    return cos, sin
