"""Writes an MTP module into the GGUF file of its target, where llama.cpp looks for it: the block behind the last layer.

llama.cpp drafts so with the file of a family whose graph has such a block. Names are those of its converter.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.json_input import refuse_other_target
from spec_lab.checkpoints.mtp_checkpoint import load_mtp
from spec_lab.core.errors import UserError
from spec_lab.export.gguf_files import Tensors, opened_gguf, target_parts, write_file

DRAFTED = ("qwen35",)
"""The architectures of files with whose module llama.cpp drafts, of those whose modules are read here."""
NAMES = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_mtp(path: Path, folder: Path, target: Path) -> None:
    """Write the target of a GGUF file with the MTP module in `folder`, all weights in float32.

    Raises:
        UserError: llama.cpp does not draft so with the target, its file has a module, or the module is another's.
    """
    file = opened_gguf(target)
    name = file.architecture
    if name not in DRAFTED:
        raise UserError(
            f"{target}: llama.cpp drafts with an MTP module in a file of {', '.join(DRAFTED)}, not of {name}; "
            "use an EAGLE-3 head"
        )
    if file.sizes.get("nextn_predict_layers"):
        raise UserError(f"{target}: has an MTP module; take the file without it")
    model = read_model_config(folder)
    its, source = read_model_config(target), str(folder / "config.json")
    refuse_other_target(source, its, hidden_size=model.hidden_size, vocab_size=model.vocab_size)
    _, (module,) = load_mtp(folder, model, 1, torch.float32, "cpu")
    keys, tensors = target_parts(file)
    layer = file.sizes["block_count"]
    block: Tensors = {
        f"blk.{layer}.{NAMES[ours.removesuffix('.weight')]}.weight": (
            tuple(weight.shape),
            partial(module.__getitem__, ours),
        )
        for ours, weight in module.items()
    }
    counts = {f"{name}.block_count": layer + 1, f"{name}.nextn_predict_layers": 1}
    write_file(path, name, {**keys, **counts}, {**tensors, **block})
