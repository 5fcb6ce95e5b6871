"""The floor of a round: the least time in which a GPU can read what the round must read, or do its products, whichever
takes longer.

A forward reads its weights once, whatever its number of rows, and only the experts that some row chose. It reads the
keys and values (or latent rows) of every request once. Activations, small operators and writes are not counted, so no
implementation reaches the floor. The exception is the states that a gated delta net writes, which are most of what it
moves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.delta_sizes import STATE_ITEM_SIZE, DeltaNetSizes
from spec_lab.checkpoints.gemma4_assistant_checkpoint import assistant_tensor_shapes
from spec_lab.checkpoints.gemma4_assistant_config import AssistantConfig
from spec_lab.checkpoints.gemma4_checkpoint import gemma4_tensor_shapes
from spec_lab.checkpoints.keep_fp8 import is_product
from spec_lab.checkpoints.mtp_checkpoint import mtp_tensor_shapes
from spec_lab.checkpoints.plan import LayerPlan
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
        num_bytes: bytes read from memory, and the counted writes.
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


def target_work(
    config: ModelConfig,
    batch_size: int,
    num_rows: int,
    seq_len: float,
    experts_read: float = 0.0,
    replays: bool = False,
    is_fp8: bool = False,
) -> Work:
    """Work of verifying `num_rows` rows of each of `batch_size` requests with `seq_len` keys. `experts_read` is the
    number of different experts read, summed over layers. `replays` is recurrent.rollback=replay, and `is_fp8` is
    target.weight_dtype=fp8."""
    shapes = decoder_tensor_shapes(config) if config.gemma4 is None else gemma4_tensor_shapes(config)
    elements = weights_read(shapes, left_out=expert_names(shapes))
    if config.tie_word_embeddings:
        elements += config.vocab_size * config.hidden_size
    work = _forward_work(config, elements, batch_size, num_rows, seq_len, experts_read)
    nets = (plan.delta_net for plan in config.layers if plan.delta_net is not None)
    states = sum(_state_bytes(net, num_rows, replays) for net in nets)
    gathered = num_rows * config.num_layers * config.gemma4.per_layer_width * ITEM_SIZE if config.gemma4 else 0
    narrow = sum(prod(shape) for name, shape in shapes.items() if is_product(name)) if is_fp8 else 0
    saved = narrow * (ITEM_SIZE - FP8_ITEM_SIZE)
    return Work(work.num_bytes + batch_size * (states + gathered) - saved, work.flops)


def prompt_work(config: ModelConfig, num_tokens: int) -> Work:
    """Work of the pass of one prompt, in which weights are read once. The head and the drafter's part are left out. It
    is only for targets whose layers are all plain attention and MLPs."""
    elements = weights_read(decoder_tensor_shapes(config), left_out={"lm_head.weight"})
    return _forward_work(config, elements, 1, num_tokens, num_tokens / 2, 0.0)


def _state_bytes(net: DeltaNetSizes, num_rows: int, replays: bool) -> int:
    """Count the bytes of states that a layer moves for one request. It reads one state, and writes one for each row. If
    it `replays`, it writes one, and reads and writes the rows."""
    state, row = prod(net.state_shape), net.key_size + net.value_size
    moved = 2 * state + 2 * num_rows * row if replays else (1 + num_rows) * state
    return moved * STATE_ITEM_SIZE


def assistant_work(config: AssistantConfig, batch_size: int, seq_len: float) -> Work:
    """Work of one draft step of a Gemma 4 assistant, whose head is its own embedding, or the rows of it in the
    likeliest clusters."""
    elements, rows = weights_read(assistant_tensor_shapes(config)), config.target.vocab_size
    gathered = 0.0
    if config.centroids is not None:
        rows = rows // config.centroids.num_centroids * config.centroids.top_k
        gathered = batch_size * rows * config.hidden_size
    else:
        elements += rows * config.hidden_size
    kv = sum(
        2 * config.target.layers[layer.kv_source].num_kv_heads * layer.head_dim * min(seq_len, layer.window or seq_len)
        for layer in config.layers
    )
    return Work(ITEM_SIZE * (elements + gathered + batch_size * kv), 2 * (batch_size * elements + gathered))


def module_work(layer: ModelConfig, batch_size: int, num_rows: int, seq_len: float, experts_read: float = 0.0) -> Work:
    """Work of one pass of an MTP module over `num_rows` rows of each request, and of the target's head after it."""
    shapes = mtp_tensor_shapes(layer)
    elements = weights_read(shapes, left_out=expert_names(shapes)) + layer.vocab_size * layer.hidden_size
    return _forward_work(layer, elements, batch_size, num_rows, seq_len, experts_read)


def expert_names(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Name the tensors that hold all experts of a layer, of which a forward reads some."""
    return {name for name in shapes if ".experts." in name}


def _forward_work(
    config: ModelConfig, elements: float, batch_size: int, num_rows: int, seq_len: float, experts_read: float
) -> Work:
    """Work of a forward over `config.layers` that reads `elements` of weights besides experts."""
    read, chosen = experts_read * expert_elements(config), 0
    for plan in config.layers:
        chosen += plan.experts.num_chosen * expert_elements(config) if plan.experts is not None else 0
    kv = sum(_seen(plan, seq_len) * _cached_numbers(plan) for plan in config.layers if plan.kv_owner is None)
    attended = sum(_seen(plan, seq_len) * _attended_numbers(plan) for plan in config.layers)
    num_bytes = ITEM_SIZE * (elements + read + batch_size * kv)
    return Work(num_bytes, 2 * batch_size * num_rows * (elements + chosen + attended))


def _seen(plan: LayerPlan, seq_len: float) -> float:
    """Count the keys that a row of a layer sees; a delta net has none."""
    if plan.delta_net is not None:
        return 0.0
    return min(seq_len, plan.window or seq_len)


def expert_elements(config: ModelConfig) -> int:
    """Count the elements of one expert, 0 where no layer has any."""
    widths = {plan.experts.intermediate_size for plan in config.layers if plan.experts is not None}
    assert len(widths) <= 1, "the experts of all layers are alike"
    return 3 * config.hidden_size * sum(widths)


def _cached_numbers(plan: LayerPlan) -> int:
    """Count the numbers that a layer's cache holds for a token."""
    return 2 * plan.num_kv_heads * plan.head_dim if plan.latent is None else plan.latent.row_width


def _attended_numbers(plan: LayerPlan) -> int:
    """Count the multiplications of a query row with a token of the cache, in both products."""
    each = 2 * plan.head_dim if plan.latent is None else plan.latent.row_width + plan.latent.kv_lora_rank
    return plan.num_heads * each


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
