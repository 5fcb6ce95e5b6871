"""Writes a target's hidden states over texts to safetensors, for drafters that are trained elsewhere.

python -m spec_lab.collect target=hf target.path=DIR 'data=outputs/texts-*' 'layers=[1,14,26]' hydra.run.dir=states

A file has ids, lengths of texts and prompts, and in bfloat16 `taps` [tokens, taps * hidden] and `final_hidden` [tokens,
hidden], after the last norm. `header.json` names the layers in the convention of each project that reads such files: a
wrong guess costs acceptance without an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from safetensors.torch import save_file
from torch import Tensor

from spec_lab.checkpoints.eagle3_checkpoint import default_tap_layer_inputs
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.taps import OFFSETS, Tap, numbers_of, taps_of_inputs
from spec_lab.train.config import TargetChoice
from spec_lab.train.data import Text, read_runs
from spec_lab.train.packed import PackedRows
from spec_lab.train.program import ended, store_targets
from spec_lab.train.serving import origin_of, target_path
from spec_lab.train.target import FrozenTarget


@dataclass
class CollectConfig:
    """What to collect.

    Attributes:
        data: folders of runs (a glob).
        layers: whose outputs are written, from 0, with -1 for the embedding; [] takes those that EAGLE-3 reads.
        tokens_per_file: a kill loses at most one file; the same command writes those that are missing.
    """

    defaults: list[Any] = field(default_factory=lambda: [{"target": "pocket"}, "_self_"])
    target: TargetChoice = MISSING
    data: str = MISSING
    layers: list[int] = field(default_factory=list)
    tokens_per_file: int = 2**18
    device: str = "cpu"


def collect(config: CollectConfig, folder: Path) -> None:
    """Write the files that are missing in `folder`."""
    path = target_path(config.target)
    runs = read_runs(config.data, origin_of(path))
    texts = [text for run in runs for text in run.texts]
    inputs = [layer + 1 for layer in config.layers] or default_tap_layer_inputs(read_model_config(path).num_layers)
    taps, device = taps_of_inputs(inputs), torch.device(config.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = FrozenTarget.load(path, device, dtype, max(len(text.ids) for text in texts))
    layers = {name: numbers_of(taps, offset) for name, offset in OFFSETS.items()}
    (folder / "header.json").write_text(json.dumps({"target": runs[0].origin.target, "layers": layers}, indent=1))
    starts = torch.tensor([len(text.ids) for text in texts]).cumsum(0) // config.tokens_per_file
    for number in starts.unique().tolist():
        file = folder / f"hidden-{number:05d}.safetensors"
        if not file.exists():
            part = [text for text, its in zip(texts, starts.tolist(), strict=True) if its == number]
            save_file(states_of(target, part, taps), file.with_suffix(".unfinished"))
            file.with_suffix(".unfinished").replace(file)


def states_of(target: FrozenTarget, texts: Sequence[Text], taps: tuple[Tap, ...]) -> dict[str, Tensor]:
    """Return the tensors of a file."""
    tapped, final = [], []
    for text in texts:
        ids = torch.from_numpy(text.ids)[None]
        ones, places = torch.ones_like(ids), torch.arange(ids.shape[1])[None]
        outputs = target.run(PackedRows(ids, ones, places, ones > 0).to(target.device), taps)
        tapped.append(outputs.tapped[0].bfloat16().cpu())
        final.append(outputs.final_hidden[0].bfloat16().cpu())
    return {
        "tokens": torch.cat([torch.from_numpy(text.ids) for text in texts]),
        "lengths": torch.tensor([len(text.ids) for text in texts]),
        "prompt_lengths": torch.tensor([text.prompt_length for text in texts]),
        "taps": torch.cat(tapped),
        "final_hidden": torch.cat(final),
    }


@hydra.main(config_path=None, config_name="collect", version_base="1.3")
def main(composed: DictConfig) -> None:
    """Collect into Hydra's folder."""
    config: Any = OmegaConf.to_object(composed)
    ended(lambda folder: collect(config, folder))


if __name__ == "__main__":
    store_targets()
    ConfigStore.instance().store(name="collect", node=CollectConfig)
    main()
