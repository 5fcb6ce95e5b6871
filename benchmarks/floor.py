"""The floor of a round: the least time in which a GPU can read what the round must read, or do its products, whichever
takes longer.

A forward reads its weights once, whatever its number of rows. It reads the keys and values of every request once.
Activations, small operators and writes are not counted, so no implementation reaches the floor. Only layers of plain
attention and MLPs are counted. Revision 1cf45efc also counts experts, latent rows, states, MTP modules and assistants.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.keep_narrow import is_product
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes

# Measured on an H200: a streaming read, and a bf16 product of 8192^3.
BYTES_PER_SECOND = 4.2e12
FLOPS_PER_SECOND = 790e12
ITEM_SIZE = 2  # bf16
FP8_ITEM_SIZE = 1 + 4 / 128**2  # with a float32 scale for 128 x 128 numbers


@dataclass(frozen=True, slots=True)
class Work:
    """The bytes and the operations of one forward.

    Attributes:
        num_bytes: bytes read from memory.
        flops: operations of its products; a multiplication with its addition is two.
    """

    num_bytes: float
    flops: float

    @property
    def seconds(self) -> float:
        """The longer of the two times, since reads and products can overlap."""
        return max(self.num_bytes / BYTES_PER_SECOND, self.flops / FLOPS_PER_SECOND)


def weights_read(shapes: Mapping[str, tuple[int, ...]], left_out: Collection[str] = ()) -> int:
    """Count the elements of all tensors that a forward reads whole. Embeddings are left out: one row is read for each
    token."""
    return sum(prod(shape) for name, shape in shapes.items() if "embed_tokens" not in name and name not in left_out)


def target_work(config: ModelConfig, batch_size: int, num_rows: int, seq_len: float, is_fp8: bool = False) -> Work:
    """Work of verifying `num_rows` rows of each of `batch_size` requests with `seq_len` keys. `is_fp8` is
    target.weight_dtype=fp8."""
    shapes = decoder_tensor_shapes(config)
    elements = weights_read(shapes)
    if config.tie_word_embeddings:
        elements += config.vocab_size * config.hidden_size
    work = _forward_work(config, elements, batch_size, num_rows, seq_len)
    narrow = sum(prod(shape) for name, shape in shapes.items() if is_product(name)) if is_fp8 else 0
    return Work(work.num_bytes - narrow * (ITEM_SIZE - FP8_ITEM_SIZE), work.flops)


def prompt_work(config: ModelConfig, num_tokens: int) -> Work:
    """Work of the pass of one prompt, in which weights are read once. The head and the drafter's part are left out."""
    elements = weights_read(decoder_tensor_shapes(config), left_out={"lm_head.weight"})
    return _forward_work(config, elements, 1, num_tokens, num_tokens / 2)


def _forward_work(config: ModelConfig, elements: float, batch_size: int, num_rows: int, seq_len: float) -> Work:
    """Work of a forward over `config.layers` that reads `elements` of weights."""
    assert all(plan.is_plain for plan in config.layers), "what other layers read is not counted"
    seen = [(plan, min(seq_len, plan.window or seq_len)) for plan in config.layers]
    kv = sum(keys * 2 * plan.num_kv_heads * plan.head_dim for plan, keys in seen)
    attended = sum(keys * 2 * plan.num_heads * plan.head_dim for plan, keys in seen)
    return Work(ITEM_SIZE * (elements + batch_size * kv), 2 * batch_size * num_rows * (elements + attended))


def draft_work(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    num_draft_tokens: int,
    batch_size: int,
    seq_len: float,
) -> list[Work]:
    """Work of each draft step of an EAGLE-3 head with one layer. Only the first step reads `fc`, for the verified
    rows."""
    plan = config.layers[0]
    once = {"fc.weight"}
    elements = weights_read(shapes, left_out=once)
    kv = 2 * plan.num_kv_heads * plan.head_dim * seq_len * batch_size
    step = Work(ITEM_SIZE * (elements + kv), 2 * batch_size * elements)
    fused = prod(shapes["fc.weight"])
    first = Work(step.num_bytes + ITEM_SIZE * fused, step.flops + 2 * batch_size * (num_draft_tokens + 1) * fused)
    return [first, *[step] * (num_draft_tokens - 1)]
