"""The floor of a round: the time in which a GPU could read what the round has to read, or multiply what it has to.

Weights are read once a forward, whatever the number of rows; the keys and values of every request once a forward. What
is written, activations and the many small operators are left out, so no implementation reaches it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from spec_lab.models.config import ModelConfig
from spec_lab.models.tensor_shapes import decoder_tensor_shapes

# Measured on an H200: a streaming read, and a bf16 product of 8192^3.
BYTES_PER_SECOND = 4.2e12
FLOPS_PER_SECOND = 790e12
ITEM_SIZE = 2  # bf16


@dataclass(frozen=True, slots=True)
class Work:
    """Says what one forward does.

    Attributes:
        num_bytes: read from memory.
        flops: of its products, two for a multiplication and its sum.
    """

    num_bytes: float
    flops: float

    @property
    def seconds(self) -> float:
        """The longer of the two: reads and products overlap at best."""
        return max(self.num_bytes / BYTES_PER_SECOND, self.flops / FLOPS_PER_SECOND)


def weights_read(shapes: Mapping[str, tuple[int, ...]], left_out: Collection[str] = ()) -> int:
    """Count the elements of all tensors that a forward reads whole; an embedding gives a row a token only."""
    return sum(prod(shape) for name, shape in shapes.items() if "embed_tokens" not in name and name not in left_out)


def target_work(config: ModelConfig, batch_size: int, num_rows: int, seq_len: float) -> Work:
    """Work of verifying `num_rows` rows of each of `batch_size` requests with `seq_len` keys."""
    shapes = decoder_tensor_shapes(config)
    elements = weights_read(shapes)
    if config.tie_word_embeddings:
        elements += config.vocab_size * config.hidden_size
    kv = sum(2 * plan.num_kv_heads * plan.head_dim * seq_len for plan in config.layers if plan.kv_owner is None)
    attended = sum(2 * plan.num_heads * plan.head_dim * seq_len for plan in config.layers)
    rows = batch_size * num_rows
    return Work(ITEM_SIZE * (elements + batch_size * kv), 2 * rows * (elements + attended))


def draft_work(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    num_draft_tokens: int,
    batch_size: int,
    seq_len: float,
) -> list[Work]:
    """Work of each draft step of an EAGLE-3 head of one layer; `fc` is read by the first, over the verified rows."""
    plan = config.layers[0]
    once = {"fc.weight"}
    elements = weights_read(shapes, left_out=once)
    kv = 2 * plan.num_kv_heads * plan.head_dim * seq_len * batch_size
    step = Work(ITEM_SIZE * (elements + kv), 2 * batch_size * elements)
    fused = prod(shapes["fc.weight"])
    first = Work(step.num_bytes + ITEM_SIZE * fused, step.flops + 2 * batch_size * (num_draft_tokens + 1) * fused)
    return [first, *[step] * (num_draft_tokens - 1)]
