"""`drafter=mtp_eagle` and `drafter=mtp_vanilla`: multi-token-prediction modules for a target that came without."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spec_lab.train.checkpoint import load_drafter, save_drafter
from spec_lab.train.drafter import DrafterDescription, DraftMatcher, TrainingTask
from spec_lab.train.drafter_config import MtpTrainingConfig
from spec_lab.train.loop import CurvePoint
from spec_lab.train.mtp import MtpDrafter, MtpShape
from spec_lab.train.unroll import train_unrolled, unrolled_loss_words, unrolled_matcher

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


@dataclass(frozen=True, slots=True)
class MtpRecipe:
    """Trains MTP modules on the target's own texts: one for all steps, or one a step."""

    config: MtpTrainingConfig

    def train(self, task: TrainingTask, folder: Path) -> list[CurvePoint]:
        """Train the drafter and save it. The norm before the head begins as the target's: it feeds the same head."""
        torch.manual_seed(task.seed)
        head = task.model.get_output_embeddings().weight
        drafter = MtpDrafter(self._shape(task.model), self.config.num_modules, head)
        for module in drafter.chain():
            module.shared_head.norm.weight.data.copy_(task.model.model.norm.weight)
        curve = train_unrolled(drafter, self.config, task)
        save_modules(drafter, task.model, folder)
        return curve

    def matcher(self, folder: Path, model: Qwen3ForCausalLM, device: torch.device) -> DraftMatcher:
        """Put the saved drafter beside its target, as `DrafterRecipe` says. It computes in float32."""
        return unrolled_matcher(load_modules(folder, model).to(device).eval(), model)

    def describe(self, folder: Path) -> DrafterDescription:
        """Say for the card what `DrafterRecipe` asks."""
        _, config = load_drafter(folder)
        several = config["num_nextn_predict_layers"] > 1
        return DrafterDescription(
            kind=f"a chain of {config['num_nextn_predict_layers']} MTP modules" if several else "an MTP module",
            reading=f"""{"Each has" if several else "It has"} one Qwen3 layer with {config["num_attention_heads"]} query
and {config["num_key_value_heads"]} key-value heads and feed-forward {config["intermediate_size"]}, and drafts the whole
vocabulary with the target's own embedding and head, which are not in the file.

Row p pairs the target's embedding of token p+1 with its final hidden state at p, after the norm, at rotary position
{"p-i in module i, the first being module 0" if several else "p"}: `eh_proj` reads the
embedding's half first. What is recycled is the module's own state after `shared_head.norm`. """
            + (VANILLA if several else EAGLE),
            loss=unrolled_loss_words(self.config),
        )

    def _shape(self, model: Qwen3ForCausalLM) -> MtpShape:
        target = model.config
        return MtpShape(
            hidden_size=target.hidden_size,
            **asdict(self.config.sizes),
            rope_theta=target.rope_parameters["rope_theta"],
            rms_norm_eps=target.rms_norm_eps,
        )


EAGLE = "The same module takes every draft step, over one cache."
VANILLA = """Each draft is made by the next module, over a cache of its own: the pairs of the committed text, then
those of the drafts before, whose hidden states are what the modules before left."""


def save_modules(drafter: MtpDrafter[MtpShape], model: Qwen3ForCausalLM, folder: Path) -> None:
    """Save module i under `model.layers.{num_hidden_layers + i}.`; the config is the target's with the module's
    sizes."""
    target: dict[str, Any] = json.loads(model.config.to_json_string())
    shape, modules = drafter.shape, drafter.chain()
    config = target | {
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_nextn_predict_layers": len(modules),
        "dtype": "bfloat16",
    }
    tensors: dict[str, Tensor] = {}
    for index, module in enumerate(modules, start=target["num_hidden_layers"]):
        tensors |= {f"model.layers.{index}.{name}": tensor for name, tensor in module.state_dict().items()}
    save_drafter(tensors, config, folder)


def load_modules(folder: Path, model: Qwen3ForCausalLM) -> MtpDrafter[MtpShape]:
    """Load the saved modules beside their target, the weights held in float32."""
    tensors, config = load_drafter(folder)
    shape = MtpShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        rms_norm_eps=config["rms_norm_eps"],
    )
    drafter = MtpDrafter(shape, config["num_nextn_predict_layers"], model.get_output_embeddings().weight)
    for index, module in enumerate(drafter.chain(), start=config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        module.load_state_dict({name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)})
    return drafter
