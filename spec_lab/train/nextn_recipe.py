"""`drafter=nextn`: an MTP module with a layer of the target's kind, saved in the layout of its family's checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from spec_lab.checkpoints.checkpoint import run_dtype
from spec_lab.checkpoints.mtp_layouts import DEEPSEEK, QWEN3_NEXT, MtpLayout
from spec_lab.train.checkpoint import load_drafter, save_config
from spec_lab.train.drafter import DrafterDescription, DraftMatcher, TrainingTask
from spec_lab.train.drafter_config import NextnTrainingConfig
from spec_lab.train.loop import CurvePoint
from spec_lab.train.nextn import TargetKindModule
from spec_lab.train.target import sizes_of
from spec_lab.train.unroll import train_unrolled, unrolled_loss_words, unrolled_matcher

LAYOUT_OF = {"hybrid": QWEN3_NEXT, "deepseek_v3": DEEPSEEK}
"""The layout of a family's modules, by the family's name in this engine."""


@dataclass(frozen=True, slots=True)
class NextnRecipe:
    """Trains one module, which takes every draft step, for a target of a kind in `LAYOUT_OF`."""

    config: NextnTrainingConfig

    def train(self, task: TrainingTask, folder: Path) -> list[CurvePoint]:
        """Train the module and save it, as `DrafterRecipe` says."""
        torch.manual_seed(task.seed)
        drafter = TargetKindModule(task.model, self.config.intermediate_size)
        curve = train_unrolled(drafter, self.config, task)
        save_module(drafter, task.model, self.config.intermediate_size, folder)
        return curve

    def matcher(self, folder: Path, model: Any, device: torch.device) -> DraftMatcher:
        """Load the saved module for its target, in float32; see `DrafterRecipe`."""
        return unrolled_matcher(load_module(folder, model).to(device).eval(), model)

    def describe(self, folder: Path) -> DrafterDescription:
        """Describe the drafter for its card; see `DrafterRecipe`."""
        _, config = load_drafter(folder)
        return DrafterDescription(
            kind="an MTP module",
            reading=f"""Its layer is of its target's own kind (`{config["architectures"][0]}`), and its file has the
layout of that family's checkpoints. It drafts the whole vocabulary with the target's own embedding and head, which are
not in the file.

Row p pairs the target's embedding of token p+1 with its final hidden state at p, after the norm, at rotary position p;
the embedding's half comes first. The next step gets the module's own state after its last norm. The same module takes
every draft step, over one cache.""",
            loss=unrolled_loss_words(self.config),
        )


def save_module(drafter: TargetKindModule, target: Any, intermediate_size: int, folder: Path) -> None:
    """Save the module. Its config is the target's, with the module's width and the number of modules."""
    sizes = sizes_of(target)
    layout = LAYOUT_OF[sizes.family]
    tensors = {
        file_name(layout, name, sizes.num_layers): tensor.to(run_dtype(name, torch.bfloat16)).contiguous().cpu()
        for name, tensor in drafter.named_tensors().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    counts = {"mtp_num_hidden_layers": 1} if layout is QWEN3_NEXT else {"num_nextn_predict_layers": 1}
    own = counts | {"intermediate_size": intermediate_size, "dtype": "bfloat16"}
    save_config(json.loads(target.config.to_json_string()) | own, folder)


def load_module(folder: Path, target: Any) -> TargetKindModule:
    """Load the saved module for its target, with weights in float32."""
    tensors, config = load_drafter(folder)
    drafter, sizes = TargetKindModule(target, config["intermediate_size"]), sizes_of(target)
    layout = LAYOUT_OF[sizes.family]
    drafter.take({name: tensors[file_name(layout, name, sizes.num_layers)] for name in drafter.named_tensors()})
    return drafter


def file_name(layout: MtpLayout, name: str, num_layers: int) -> str:
    """Return the name in the file of a tensor of module 0, given DeepSeek's name without prefix."""
    numbers = {"module": 0, "layer": num_layers}
    if name in layout.names:
        return layout.module_prefix.format(**numbers) + layout.names[name]
    return layout.layer_prefix.format(**numbers) + name
