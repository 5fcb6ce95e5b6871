"""The attention backends: a row for each."""

from __future__ import annotations

from spec_lab.assembly.deferred import Deferred
from spec_lab.assembly.option import AttentionOption

LOADER = "spec_lab.assembly.attention_loader"

OPTIONS = (
    AttentionOption(
        name="torch",
        make=Deferred(LOADER, "torch_attention"),
        make_for_trees=Deferred(LOADER, "torch_tree_attention"),
    ),
    AttentionOption(
        name="triton",
        make=Deferred(LOADER, "triton_attention"),
        make_for_trees=Deferred(LOADER, "triton_tree_attention"),
        needs_triton=True,
    ),
)
