"""Reads the weights of a Hugging Face folder or a GGUF file. Names and shapes are checked before any data is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open

from spec_lab.checkpoints.checkpoint_files import (
    WHOLE_TENSORS,
    LazyTensors,
    Slices,
    StoredTensor,
    checkpoint_files,
    tensors_of,
)
from spec_lab.checkpoints.expert_checkpoint import EXPONENT_BIAS, with_experts_of_gpt_oss, with_stacked_experts
from spec_lab.checkpoints.gguf import gguf_tensors
from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.keep_narrow import NarrowForm
from spec_lab.checkpoints.quantised import with_products_as_stored, with_quantised
from spec_lab.core.errors import UserError

EMBEDDING = "model.embed_tokens.weight"
UNUSED = re.compile(r"rotary_emb\.inv_freq$|\.self_attn\.indexer\.")
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
# These are float32 for every dtype of the run. The first is added to scores, whose differences bfloat16 would lose.
# The next two determine a state's decay over thousands of rows (SGLang #20741). Sinks join float32 sums.
FLOAT32_TENSORS = (".e_score_correction_bias", ".A_log", ".dt_bias", ".sinks")
LARGEST_WEIGHT = 1e6
"""Weights of trained models stay under a few thousand. With larger ones, float32 sums of squares lose small terms."""

NEVER_ZERO = (
    *(".q_proj.weight", ".k_proj.weight", ".v_proj.weight", ".gate_proj.weight", ".up_proj.weight"),
    *("attn_q.weight", "attn_k.weight", "attn_v.weight", "ffn_gate.weight", "ffn_up.weight"),
)
"""Matrices that are never initialised to zero, unlike the last matrix of a layer or a head; GGUF's names too."""

Names = tuple[tuple[str, str], ...]
"""The names of a format: patterns, and what replaces them."""
OwnTensors = Callable[[Mapping[str, StoredTensor]], dict[str, StoredTensor]]


def open_tensors(
    folder: Path,
    wanted: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device | str,
    slices: Slices = WHOLE_TENSORS,
    own: OwnTensors = dict,
    narrow: NarrowForm | None = None,
) -> LazyTensors:
    """Check the wanted tensors of a folder or a GGUF file. Each is read on access.

    They are in the order of `wanted`. Each is cut to the part that `slices` keeps, and cast as in `read_tensors`.

    Some tensors of a folder are silently ignored: those that `stored_tensors` leaves out, an `lm_head.weight` equal to
    the embedding it is tied to, and those that `own` leaves out (`target_tensors`).

    Args:
        wanted: name -> shape of every tensor the model has.
        own: picks the model's tensors from all in the folder, and gives them the names of `wanted`.
        narrow: the form in which matrices stay if they are stored in it, with scales
            (`quantised.with_products_as_stored`).

    Raises:
        UserError: a missing, unreadable or incomplete file, or tensors missing, of another shape, not expected or in an
            unsupported quantization. On access: a value that no model has (`refuse_impossible`).
    """
    stored = own(stored_tensors(folder))
    tied_head = None if "lm_head.weight" in wanted else stored.pop("lm_head.weight", None)
    check_tensors(stored, wanted, (), str(folder))
    if tied_head is not None:  # transformers 4 ignores it, transformers 5 uses it
        tied = read_tensors({"": tied_head, EMBEDDING: stored[EMBEDDING]}, torch.float32, "cpu")
        if not torch.equal(tied[""], tied[EMBEDDING]):
            raise UserError(f"{folder}: config.json ties lm_head to the embedding, but the tensors differ")
    kept = {name: replace(stored[name], part=slices.part(name, shape)) for name, shape in wanted.items()}
    read = kept if narrow is None else with_products_as_stored(kept, narrow)
    return LazyTensors(read, lambda name: read_tensors({name: read[name]}, dtype, device)[name])


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder or a GGUF file, from the headers, under the names of a folder.

    Quantised matrices are single tensors (`quantised`). A layer's experts are stacked, even if the file has tensors for
    each (`expert_checkpoint`). Rotary buffers of old exports are left out. So are the indexers of
    DeepSeek-V3.2's sparse attention: sequences here are limited to lengths at which an indexer chooses every key
    (`ModelConfig.max_dense_positions`).
    """
    if is_gguf(folder):
        return gguf_tensors(folder)
    files = (tensors_of(file).items() for file in checkpoint_files(folder))
    needed = {name: tensor for tensors in files for name, tensor in tensors if not UNUSED.search(name)}
    return with_experts_of_gpt_oss(with_stacked_experts(with_quantised(needed, folder)))


def renamed(stored: Mapping[str, StoredTensor], patterns: Names) -> dict[str, StoredTensor]:
    """Give tensors the names that the lab has for them. Every pattern is replaced, from the first to the last."""
    result = {}
    for name, tensor in stored.items():
        for pattern, ours in patterns:
            name = re.sub(pattern, ours, name)
        result[name] = tensor
    return result


def read_wanted(
    stored: Mapping[str, StoredTensor],
    wanted: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device | str,
    source: str,
    optional: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """Read the tensors of a head, by name. Those of `optional` may be missing.

    Raises:
        UserError: tensors that are missing, left over, of another shape or in an unsupported quantization.
    """
    check_tensors(stored, wanted, optional, source)
    return read_tensors({name: stored[name] for name in wanted if name in stored}, dtype, device)


def check_tensors(
    stored: Mapping[str, StoredTensor], wanted: Mapping[str, tuple[int, ...]], optional: Collection[str], source: str
) -> None:
    """Refuse a checkpoint whose tensors are not the wanted ones, in one line with the first differences of each kind.

    An unexpected tensor is refused as well, since in a supported family it means that the model was misread. So are
    weights that are neither plain floating point nor widened, which would be read as wrong numbers.
    """
    pieces = [piece for whole in stored.values() for expert in whole.stack or ((whole,),) for piece in expert]
    complaints = {
        "missing": [name for name in wanted if name not in stored and name not in optional],
        "of another shape": [
            f"{name} is {list(stored[name].shape)}, its config says {list(shape)}"
            for name, shape in wanted.items()
            if name in stored and stored[name].shape != shape
        ],
        "not expected": [name for name in stored if name not in wanted],
        "of fewer than 16 bits, without scales": [
            f"{piece.name} is {piece.dtype}" for piece in pieces if piece.dtype not in FLOAT_DTYPES
        ],
    }
    found = [f"{len(names)} {kind}: {', '.join(names[:4])}" for kind, names in complaints.items() if names]
    if found:
        raise UserError(f"{source}: the tensors do not fit its config ({'; '.join(found)})")


def read_tensors(
    stored: Mapping[str, StoredTensor], dtype: torch.dtype, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Read tensors from disk. Floating tensors are cast to `dtype`, others keep their type.

    Those in `FLOAT32_TENSORS` are always float32; those with `kept` have that type. Every tensor is copied. A tensor
    mapped to its file would change, or fault, when training rewrites the file.

    Raises:
        UserError: a tensor with values that no model has, such as NaN, in the file or after the cast.
    """
    with ExitStack() as files:
        opened_file = cache(lambda file: files.enter_context(safe_open(file, "pt")))

        def read(name: str, tensor: StoredTensor) -> torch.Tensor:
            if tensor.stack:  # meanwhile its experts are in memory up to three times
                experts = (torch.cat([read(piece.name, piece) for piece in pieces]) for pieces in tensor.stack)
                return torch.stack(list(experts))
            value = tensor.read(opened_file)
            kept = tensor.kept or (run_dtype(name, dtype) if value.is_floating_point() else value.dtype)
            made = value.to(device=device, dtype=kept, copy=True)
            refuse_impossible(made, value, tensor.file, tensor.name)
            return made

        return {name: read(name, tensor) for name, tensor in stored.items()}


def run_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that the tensor `name` has in a model of `dtype`."""
    return torch.float32 if name.endswith(FLOAT32_TENSORS) else dtype


def refuse_impossible(kept: torch.Tensor, value: torch.Tensor, file: Path, tensor: str) -> None:
    """Raise UserError if a tensor has values that no model has.

    Args:
        kept: the tensor as the run holds it.
        value: the tensor before the cast to the dtype of `kept`.
        tensor: its name in the file.
    """
    largest = _largest(kept)
    if largest > LARGEST_WEIGHT or (largest == 0 and tensor.endswith(NEVER_ZERO)):
        found = f"values of {largest:.0e} in {kept.dtype}, {_largest(value):.0e} in the file (NaN counts as infinite)"
        raise UserError(f"{file}: {tensor} has {found if largest else 'all zeros'}, which no trained model has")


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value, or the bits of it in e4m3, or the largest power of two in MXFP4: infinity if a
    value is NaN, 0 for a tensor that is empty or of other integers."""
    if tensor.dtype is torch.uint8 and tensor.numel():  # exponents, where 255 is NaN; or codes, which are below 16
        return 2.0 ** (int(tensor.max()) - EXPONENT_BIAS)
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 0.0
    if tensor.dtype is torch.float8_e4m3fn:  # it has NaN and no infinity, and nothing above 448
        bits = float((tensor.view(torch.uint8) & 0x7F).max())
        return float("inf") if bits == 0x7F else bits
    largest = float(torch.stack(torch.aminmax(tensor)).abs().max())
    return largest if largest == largest else float("inf")
