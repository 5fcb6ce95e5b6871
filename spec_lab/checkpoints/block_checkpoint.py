"""The tensors of block drafters, under the names of z-lab's checkpoints."""

from __future__ import annotations

from spec_lab.checkpoints.block_config import BlockConfig, ConvSizes
from spec_lab.checkpoints.block_heads import Shapes, linear_shapes
from spec_lab.checkpoints.tensor_shapes import layer_tensor_shapes


def block_tensor_shapes(config: BlockConfig) -> Shapes:
    """Return the names and shapes of all tensors, as z-lab's checkpoints have them; the target's are not among them."""
    body, hidden = config.body, config.body.hidden_size
    shapes: Shapes = {
        "fc.weight": (hidden, len(config.taps) * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index, plan in enumerate(body.layers):
        layer = layer_tensor_shapes(plan, hidden, attention_input_size=hidden) | _conv_shapes(config.conv, hidden)
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes |= config.head.tensor_shapes(config.sizes)
    if config.confidence_reads:
        shapes |= linear_shapes("confidence_head.proj", 1, config.confidence_reads)
    return shapes


def _conv_shapes(conv: ConvSizes | None, hidden_size: int) -> Shapes:
    if conv is None:
        return {}
    num_kernels = 2 * conv.num_taps * (hidden_size // conv.group_size)
    of_half: Shapes = {
        "base_kernel": (2, conv.num_taps, hidden_size),
        "kernel_projection.weight": (num_kernels, hidden_size),
    }
    return {f"{half}.{name}": shape for half in ("attention_conv", "mlp_conv") for name, shape in of_half.items()}
