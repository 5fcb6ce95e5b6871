"""`drafter=nextn`: an MTP module whose layer is of its target's own kind, saved as its family's checkpoints have it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from spec_lab.checkpoints.mtp_layouts import DEEPSEEK, QWEN3_NEXT, MtpLayout
from spec_lab.train.checkpoint import load_drafter, save_config
from spec_lab.train.decoder import TrainableDecoder, compile_on_gpu, products_in_tf32
from spec_lab.train.decoder_checkpoint import as_saved, from_saved, in_saved_dtype
from spec_lab.train.drafter import DrafterDescription, DraftMatcher, TrainingTask
from spec_lab.train.drafter_config import NextnTrainingConfig
from spec_lab.train.loop import CurvePoint
from spec_lab.train.mtp import MtpDrafter, PlannedShape
from spec_lab.train.unroll import train_unrolled, unrolled_loss_words, unrolled_matcher

LAYOUT_OF = {"hybrid": QWEN3_NEXT, "deepseek_v3": DEEPSEEK}
"""The layout of a family's modules, by the family's name in the runtime."""


@dataclass(frozen=True, slots=True)
class NextnRecipe:
    """Trains one module, which takes every draft step, beside a `TrainableDecoder`."""

    config: NextnTrainingConfig

    def train(self, task: TrainingTask, folder: Path) -> list[CurvePoint]:
        """Train the module and save it. The norm before the head begins as the target's: it feeds the same head."""
        torch.manual_seed(task.seed)
        target: TrainableDecoder = task.model
        compile_on_gpu(target, task.device)
        drafter = make_drafter(target, self.config.intermediate_size)
        for module in drafter.chain():
            module.shared_head.norm.weight.data.copy_(target.model.norm.weight)
        with products_in_tf32():
            curve = train_unrolled(drafter, self.config, task)
        save_module(drafter, target, folder)
        return curve

    def matcher(self, folder: Path, model: Any, device: torch.device) -> DraftMatcher:
        """Put the saved module beside its target, as `DrafterRecipe` says. It computes in float32."""
        return unrolled_matcher(load_module(folder, model).to(device).eval(), model)

    def describe(self, folder: Path) -> DrafterDescription:
        """Say for the card what `DrafterRecipe` asks."""
        _, config = load_drafter(folder)
        return DrafterDescription(
            kind="an MTP module",
            reading=f"""Its layer is of its target's own kind (`{config["architectures"][0]}`), and its file as that
family's; it drafts the whole vocabulary with the target's own embedding and head, which are not in the file.

Row p pairs the target's embedding of token p+1 with its final hidden state at p, after the norm, at rotary position p;
the embedding's half comes first. What is recycled is the module's own state after its last norm. The same module takes
every draft step, over one cache.""",
            loss=unrolled_loss_words(self.config),
        )


def make_drafter(target: TrainableDecoder, intermediate_size: int) -> MtpDrafter[PlannedShape]:
    """Make a module with a layer like the target's last one; a dense one has a feed-forward width of its own."""
    config = target.config.model
    plan = replace(config.layers[-1], intermediate_size=intermediate_size)
    shape = PlannedShape(plan, config.hidden_size, config.rms_norm_eps)
    return MtpDrafter(shape, 1, target.get_output_embeddings().weight)


def save_module(drafter: MtpDrafter[PlannedShape], target: TrainableDecoder, folder: Path) -> None:
    """The config is the target's with the module's width and number."""
    layout = LAYOUT_OF[target.config.model.family]
    (module,) = drafter.chain()
    saved = in_saved_dtype(as_saved(module.state_dict(), layout.zero_centred))
    num_layers = target.config.model.num_layers
    tensors = {file_name(layout, name, num_layers): tensor for name, tensor in saved.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    counts = {"mtp_num_hidden_layers": 1} if layout is QWEN3_NEXT else {"num_nextn_predict_layers": 1}
    save_config(target.config.keys | counts | {"intermediate_size": drafter.shape.plan.intermediate_size}, folder)


def load_module(folder: Path, target: TrainableDecoder) -> MtpDrafter[PlannedShape]:
    """Load the saved module beside its target, the weights held in float32."""
    tensors, config = load_drafter(folder)
    drafter = make_drafter(target, config["intermediate_size"])
    layout = LAYOUT_OF[target.config.model.family]
    (module,) = drafter.chain()
    names = as_saved(module.state_dict(), layout.zero_centred)
    num_layers = target.config.model.num_layers
    saved: dict[str, Tensor] = {name: tensors[file_name(layout, name, num_layers)] for name in names}
    module.load_state_dict(from_saved(saved, layout.zero_centred))
    return drafter


def file_name(layout: MtpLayout, name: str, num_layers: int) -> str:
    """Name in the file a tensor of module 0 that has DeepSeek's name without prefix here."""
    numbers = {"module": 0, "layer": num_layers}
    if name in layout.names:
        return layout.module_prefix.format(**numbers) + layout.names[name]
    return layout.layer_prefix.format(**numbers) + name
