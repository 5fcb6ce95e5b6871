"""Reads the tensors of EAGLE-3 draft heads in SafeAILab's layout and in that of vLLM's speculators.

EAGLE-3: Li et al. 2025, arXiv 2503.01840. From either layout, tensors are returned under SafeAILab's names
(`fc.weight`, `midlayer.*`, `norm.weight`, `lm_head.weight`, `d2t`, `t2d`, `embed_tokens.weight`). Those that only
EAGLE-3.1 or P-EAGLE has keep the speculators' names (`input_norm.weight`, `fc_norm.{0,1,2}.weight`; `mask_hidden`,
`layers.{1,2,...}.*`).
"""

from __future__ import annotations

from pathlib import Path

import torch

from spec_lab.checkpoints.checkpoint import Names, read_tensors, read_wanted, renamed, stored_tensors
from spec_lab.checkpoints.checkpoint_files import StoredTensor
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.eagle3_config import KNOB, NUM_TAPS, Eagle3Config, HeadKind, read_eagle3_config
from spec_lab.checkpoints.tensor_shapes import layer_tensor_shapes
from spec_lab.core.errors import UserError

NAMES: Names = ((r"^model\.", ""), (r"^layers\.0\.", "midlayer."))


def load_eagle3(
    folder: Path, target: ModelConfig, dtype: torch.dtype, device: torch.device | str, kind: HeadKind = "eagle3"
) -> tuple[Eagle3Config, dict[str, torch.Tensor]]:
    """Read a head for a target: its config, and its tensors under SafeAILab's names.

    Weights are cast to `dtype`. `d2t` is [draft_vocab_size] int64, the offset from draft id to target id; `t2d` is
    [target_vocab_size] bool. A head as wide as the target may lack `embed_tokens.weight` and, without a draft
    vocabulary, `lm_head.weight`; the target's are used instead. A head without a draft vocabulary may lack `d2t`: its
    draft ids are target ids. `t2d` is only returned with `d2t`.

    Raises:
        UserError: the errors of `read_eagle3_config`; tensors missing, of another shape, not expected or in an
            unsupported quantization; a vocabulary map that is out of range or contradicts itself.
    """
    config = read_eagle3_config(folder, target, kind)
    stored = renamed(stored_tensors(folder), NAMES)
    hidden, fused = config.layer.hidden_size, stored.get("fc.weight")
    if fused is not None and fused.shape == (hidden, 2 * hidden):
        raise UserError(
            f"{folder}: fc reads one hidden state and an embedding, as in EAGLE-1 and 2, which are not read"
        )
    sizes = config.draft_vocab_size, config.target_vocab_size
    vocabulary = read_vocabulary(stored, *sizes, device, str(folder))
    optional: set[str] = set()  # the target's can replace them
    if hidden == target.hidden_size:
        optional = {"embed_tokens.weight"} | ({"lm_head.weight"} if sizes[0] == sizes[1] else set())
    tensors = read_wanted(stored, eagle3_tensor_shapes(config), dtype, device, str(folder), optional)
    return config, tensors | vocabulary


def eagle3_tensor_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a head's weights, without the vocabulary maps.

    The first layer's first products read twice the width: the embedding and the feature, each normed.
    """
    hidden = config.layer.hidden_size
    layer = layer_tensor_shapes(config.layer.only_layer, hidden, attention_input_size=2 * hidden)
    return {
        **_tap_norm_shapes(config),
        "fc.weight": (hidden, NUM_TAPS * config.target_hidden_size),
        "midlayer.hidden_norm.weight": (hidden,),
        **{f"midlayer.{name}": shape for name, shape in layer.items()},
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "embed_tokens.weight": (config.target_vocab_size, hidden),
        **_mask_shapes(config),
    }


def _mask_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Return the shapes of P-EAGLE's additional tensors: the features of mask rows, and layers after the first."""
    if config.mask_token_id is None:
        return {}
    hidden = config.layer.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"mask_hidden": (1, 1, NUM_TAPS * config.target_hidden_size)}
    for index, plan in enumerate(config.more_layers, start=1):
        layer = layer_tensor_shapes(plan, hidden, attention_input_size=hidden)
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _tap_norm_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    if config.norm_before_fc:
        return {"input_norm.weight": (NUM_TAPS * config.target_hidden_size,)}
    if config.fc_norm:
        return {f"fc_norm.{tap}.weight": (config.target_hidden_size,) for tap in range(NUM_TAPS)}
    return {}


def read_vocabulary(
    stored: dict[str, StoredTensor],
    draft_size: int,
    target_size: int,
    device: torch.device | str,
    source: str,
    knob: str = KNOB,
) -> dict[str, torch.Tensor]:
    """Take `d2t` and `t2d` out of a head's tensors, and read them as int64 and bool, if present. They must agree with
    the config and with each other. A `t2d` without `d2t` is left out. `knob` names the folder."""
    found: dict[str, StoredTensor] = {name: stored.pop(name) for name in ("d2t", "t2d") if name in stored}
    maps = read_tensors(found, torch.float32, "cpu")
    if "d2t" not in maps and draft_size == target_size:
        return {}
    d2t = maps.get("d2t", torch.zeros(draft_size)).to(torch.int64)
    target_ids = torch.arange(draft_size) + d2t
    is_in = torch.zeros(max(target_size, int(target_ids.max()) + 1), dtype=torch.bool)
    t2d = maps["t2d"].to(torch.bool) if "t2d" in maps else None
    problem = None
    if "d2t" not in maps:
        problem = f"d2t is missing, but the draft vocabulary of {draft_size} is smaller than the target's {target_size}"
    elif draft_size < target_size and t2d is None and not d2t.any():
        problem = "d2t is all zeros and there is no t2d"
    elif int(target_ids.min()) < 0 or len(is_in) > target_size:
        problem = f"d2t names a token outside the target's vocabulary of {target_size}"
    elif len(set(target_ids.tolist())) < draft_size:
        problem = "d2t gives one target id to two draft ids"
    elif t2d is not None and not torch.equal(is_in.index_fill(0, target_ids, True), t2d):
        problem = "d2t and t2d name different target ids"
    if problem:
        raise UserError(f"{source}: {problem}; set {knob} to an intact checkpoint that was trained for this target")
    return {"d2t": d2t.to(device)} | ({} if t2d is None else {"t2d": t2d.to(device)})
