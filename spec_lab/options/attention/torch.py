"""attention=torch: the reference backend, for any device, or the one with which `kernels=` replaces it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_lab.menu.option import AttentionOption

if TYPE_CHECKING:
    from spec_lab.core.layer_protocols import AttentionBackend
    from spec_lab.wiring.attention import BackendContext


def torch_attention(context: BackendContext) -> AttentionBackend:
    """Make the reference backend, or the one with which `kernels=` replaces it."""
    return context.torch_attention(context.page_size, context.max_positions, context.rope_write)


def torch_tree_attention(context: BackendContext) -> AttentionBackend:
    """Make the reference backend, with masks for the rows of trees."""
    from spec_lab.attention.torch_tree import TorchTreeAttention

    return TorchTreeAttention(context.page_size, context.max_positions, context.rope_write)


ROW = AttentionOption(name="torch", make=torch_attention, make_for_trees=torch_tree_attention)
