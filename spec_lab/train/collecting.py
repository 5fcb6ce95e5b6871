"""Writes hidden states over texts to safetensors: for each token the outputs of some layers, the state after the last
norm, and the token's id.

`header.json` names the layers in the convention of each project that reads such files (`spec_lab.checkpoints.taps`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spec_lab.checkpoints.eagle3_config import default_tap_layer_inputs
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.checkpoints.json_input import read_json
from spec_lab.checkpoints.taps import SPELLINGS, Tap, taps_of_inputs
from spec_lab.core.errors import UserError
from spec_lab.train.collect_config import CollectConfig
from spec_lab.train.frozen_target import FrozenTarget
from spec_lab.train.group import training_device
from spec_lab.train.head_texts import read_texts
from spec_lab.train.packed_rows import PackedRows
from spec_lab.train.stages import write_json
from spec_lab.train.texts.folder import Texts
from spec_lab.train.texts.header import refuse_without_header

BYTES_OF_A_STATE, BYTES_OF_AN_ID = 2, 4


def collect(path: Path, config: CollectConfig) -> Path:
    """Write the states of the target at `path` that `config` selects, and return the folder.

    Raises:
        UserError: the texts belong to another target, a layer or the folder cannot be used, or the disk has no room.
    """
    device, output = training_device(config.device), Path(config.output_dir)
    model = read_model_config(path)
    texts: Texts = read_texts(Path(config.texts), path)
    texts = texts.take(torch.arange(min(len(texts), config.num_texts or len(texts))))
    taps = taps_of(config, model.num_layers)
    a_token = (len(taps) + 1) * model.hidden_size * BYTES_OF_A_STATE + BYTES_OF_AN_ID
    total = a_token * len(texts.tokens)
    print(f"{a_token:,} bytes a token, {len(texts.tokens):,} tokens of {len(texts)} texts: {total / 1e9:.2f} GB")
    output.mkdir(parents=True, exist_ok=True)
    # An interrupted collection's files are kept or replaced, so their bytes count as free.
    room = shutil.disk_usage(output).free + sum(file.stat().st_size for file in output.glob("hidden-*.safetensors"))
    if total > room:
        fitting = int(len(texts) * room / total)
        remedy = f"use num_texts={fitting}" if fitting else "choose another one"
        raise UserError(f"output_dir={output} has room for {room / 1e9:.2f} GB; {remedy}")
    header = {
        "weights": texts.header.written_by.weights,
        "layers": {name: spelling.write(taps) for name, spelling in SPELLINGS.items()},
        "final_hidden": "behind the last norm",
        "num_texts": len(texts),
        "tokens_per_file": config.tokens_per_file,
    }
    _begin(output / "header.json", header)
    _write(path, texts, taps, config, device)
    return output


def _write(path: Path, texts: Texts, taps: tuple[Tap, ...], config: CollectConfig, device: torch.device) -> None:
    """Write the files that are missing or truncated."""
    output = Path(config.output_dir)
    longest = int(texts.lengths.max())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = FrozenTarget.load(path, device, dtype, longest)
    for number, part in enumerate(parts_of(texts, config.tokens_per_file)):
        file = output / f"hidden-{number:05d}.safetensors"
        if not _is_whole(file, part):
            unfinished = file.with_suffix(".unfinished")
            refuse_no_file(unfinished)
            save_file(states_of(target, part, taps, config.tokens_per_forward), unfinished)
            unfinished.replace(file)


def _is_whole(file: Path, part: Texts) -> bool:
    """Return whether a file has as many states as `part` has tokens. A truncated file is written again.

    Raises:
        UserError: a folder or a pipe has its name.
    """
    refuse_no_file(file)
    if not file.exists():
        return False
    try:
        with safe_open(file, "pt") as opened:
            return bool(opened.get_slice("final_hidden").get_shape()[:1] == [len(part.tokens)])
    except SafetensorError:
        return False


def refuse_no_file(file: Path) -> None:
    """Raise UserError if a folder or a pipe has the name of a file to be written."""
    if file.exists() and not file.is_file():
        raise UserError(f"output_dir={file.parent}: {file.name} is not a file; name a folder of its own")


def _begin(file: Path, header: dict[str, Any]) -> None:
    """Write the header. An existing one must be equal, so that the collection can be resumed.

    Raises:
        UserError: the folder has another header, or states without a header.
    """
    refuse_without_header(file, "hidden-*.safetensors")
    if file.exists() and read_json(file) != header:
        raise UserError(f"output_dir={file.parent} has a header.json of another kind; name a folder of its own")
    write_json(file, header)


def taps_of(config: CollectConfig, num_layers: int) -> tuple[Tap, ...]:
    """Return the layers whose outputs are kept."""
    if not config.layers:
        return taps_of_inputs(default_tap_layer_inputs(num_layers, f"use layers=[{max(num_layers - 2, -1)}]"))
    for layer in config.layers:
        if layer >= num_layers - 1 or config.layers.count(layer) > 1:
            raise UserError(
                f"layers={config.layers}: each must be named once, and be one of 0 to {num_layers - 2}, or -1 for the "
                "embedding; leave out the last layer, since the final state is always written"
            )
    return tuple(Tap(layer) for layer in sorted(config.layers))


def parts_of(texts: Texts, num_tokens: int) -> Iterator[Texts]:
    """Split texts into parts of about `num_tokens` tokens, each of whole texts."""
    number = (texts.starts[:-1] // num_tokens).tolist()
    for part in sorted(set(number)):
        yield texts.take(torch.tensor([index for index, of in enumerate(number) if of == part]))


def states_of(target: FrozenTarget, texts: Texts, taps: tuple[Tap, ...], num_tokens: int) -> dict[str, Tensor]:
    """Return the tensors of a file: ids, lengths of texts and prompts, and in bf16 `taps` [tokens, taps * hidden] and
    `final_hidden` [tokens, hidden]."""
    tapped, final = [], []
    for part in parts_of(texts, num_tokens):
        lengths = part.lengths
        place = torch.arange(len(part.tokens)) - part.starts[:-1].repeat_interleave(lengths)
        segments = torch.arange(1, len(part) + 1).repeat_interleave(lengths)
        outputs = target.run(
            PackedRows(part.tokens[None], segments[None], place[None], part.supervised()[None]).to(target.device), taps
        )
        tapped.append(outputs.tapped[0].bfloat16().cpu())
        final.append(outputs.final_hidden[0].bfloat16().cpu())
    return {
        "tokens": texts.tokens.clone(),
        "lengths": texts.lengths.clone(),
        "prompt_lengths": texts.prompt_lengths.clone(),
        "taps": torch.cat(tapped),
        "final_hidden": torch.cat(final),
    }
