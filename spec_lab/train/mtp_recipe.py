"""`drafter=mtp_eagle` and `drafter=mtp_vanilla`: trains multi-token-prediction modules for plain attention."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spec_lab.checkpoints.plan import LayerPlan, RopeConfig
from spec_lab.checkpoints.taps import Tap
from spec_lab.train.checkpoint import load_drafter, save_drafter
from spec_lab.train.drafter import DrafterDescription, DraftMatcher, TrainingTask
from spec_lab.train.drafter_config import MtpTrainingConfig
from spec_lab.train.eagle3_recipe import rope_keys
from spec_lab.train.frozen_target import FrozenTarget, draft_rope, full_plan
from spec_lab.train.head_recipe import PackedForm
from spec_lab.train.loop import CurvePoint
from spec_lab.train.module_config import LayerConfig
from spec_lab.train.mtp import ModuleShape, MtpDrafter
from spec_lab.train.packed_rows import TrainingTexts
from spec_lab.train.unroll import train_unrolled, unrolled_loss_words, unrolled_matcher
from spec_lab.train.unrolled_form import UNROLLED

if TYPE_CHECKING:
    from transformers import Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True, slots=True)
class MtpRecipe:
    """Trains MTP modules on the target's own texts: one for all steps, or one for each step."""

    config: MtpTrainingConfig

    def train(self, task: TrainingTask, folder: Path) -> list[CurvePoint]:
        """Train the drafter and save it. The norm before the head is initialised from the target's, since the head is
        the same."""
        torch.manual_seed(task.seed)
        head = task.model.get_output_embeddings().weight
        drafter = MtpDrafter(self._shape(task.model), self.config.num_modules, head)
        for module in drafter.chain():
            module.shared_head.norm.weight.data.copy_(task.model.model.norm.weight)
        curve = train_unrolled(drafter, self.config, task)
        save_modules(drafter, task.model, folder)
        return curve

    @property
    def form(self) -> PackedForm:
        return UNROLLED

    def build(self, target: FrozenTarget, texts: TrainingTexts, seed: int) -> MtpDrafter:
        """Make one module for a frozen target; see `HeadRecipe`.

        Its layer has q and k norms if the target's layers have them. Its q, k and v projections have biases if the
        target's have them and the target's `o_proj` has none. The norm before the head is initialised from the
        target's.
        """
        torch.manual_seed(seed)
        drafter = MtpDrafter(self._planned(target), 1, target.head_weight)
        drafter.chain()[0].shared_head.norm.weight.data.copy_(target.final_norm_weight)
        return drafter

    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        """Return no taps: it reads only the last hidden state."""
        return ()

    def save(self, drafter: MtpDrafter, target: FrozenTarget, folder: Path) -> None:
        """Write the module and a config of its own. As in DeepSeek's files, its layer number follows the target's
        last."""
        plan, config = drafter.shape.plan, target.config
        keys = {
            "architectures": [architecture_of(plan)],
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": plan.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": plan.num_heads,
            "num_key_value_heads": plan.num_kv_heads,
            "head_dim": plan.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": config.rms_norm_eps,
            **rope_keys(plan.rope),
            "max_position_embeddings": config.max_position_embeddings,
            "tie_word_embeddings": config.tie_word_embeddings,
            "num_nextn_predict_layers": 1,
            "torch_dtype": "bfloat16",
        }
        prefix = f"model.layers.{config.num_layers}."
        tensors = {f"{prefix}{name}": tensor for name, tensor in drafter.chain()[0].state_dict().items()}
        save_drafter(tensors, keys, folder)

    def load(self, folder: Path, target: FrozenTarget) -> MtpDrafter:
        """Read what `save` wrote, its weights held in float32."""
        tensors, _ = load_drafter(folder)
        prefix = f"model.layers.{target.config.num_layers}."
        drafter = MtpDrafter(self._planned(target), 1, target.head_weight)
        drafter.chain()[0].load_state_dict({name.removeprefix(prefix): it for name, it in tensors.items()})
        return drafter.to(target.device)

    def _planned(self, target: FrozenTarget) -> ModuleShape:
        config, sizes = target.config, self.config.sizes
        like = full_plan(config)
        plan = LayerPlan(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            rope=draft_rope(config),
            intermediate_size=sizes.intermediate_size,
            qkv_bias=like.qkv_bias and not like.o_bias,
            qk_norm=like.qk_norm,
        )
        return ModuleShape(plan, config.hidden_size, config.rms_norm_eps)

    def matcher(self, folder: Path, model: Qwen3ForCausalLM, device: torch.device) -> DraftMatcher:
        """Load the saved drafter for its target, in float32; see `DrafterRecipe`."""
        return unrolled_matcher(load_modules(folder, model).to(device).eval(), model)

    def describe(self, folder: Path) -> DrafterDescription:
        """Describe the drafter for its card; see `DrafterRecipe`."""
        _, config = load_drafter(folder)
        family = config["architectures"][0].removesuffix("ForCausalLM")
        several = config["num_nextn_predict_layers"] > 1
        return DrafterDescription(
            kind=f"a chain of {config['num_nextn_predict_layers']} MTP modules" if several else "an MTP module",
            reading=f"""{"Each has" if several else "It has"} one layer of {family} with
{config["num_attention_heads"]} query and {config["num_key_value_heads"]} key-value heads and feed-forward
{config["intermediate_size"]}, and drafts the whole
vocabulary with the target's own embedding and head, which are not in the file.

Row p pairs the target's embedding of token p+1 with its final hidden state at p, after the norm, at rotary position
{"p-i in module i, the first being module 0" if several else "p"}: `eh_proj` reads the
embedding's half first. The next step gets the module's own state after `shared_head.norm`. """
            + (VANILLA if several else EAGLE),
            loss=unrolled_loss_words(self.config),
        )

    def _shape(self, model: Qwen3ForCausalLM) -> ModuleShape:
        return qwen3_shape(model.config, self.config.sizes)


def qwen3_shape(target: Qwen3Config, sizes: LayerConfig) -> ModuleShape:
    """Return the shape of a module for `target`, with a Qwen3 layer of these `sizes`."""
    rope = RopeConfig(target.rope_parameters["rope_theta"], "none")
    plan = LayerPlan(
        sizes.num_heads,
        sizes.num_kv_heads,
        sizes.head_dim,
        rope,
        intermediate_size=sizes.intermediate_size,
        qk_norm=True,
    )
    return ModuleShape(plan, target.hidden_size, target.rms_norm_eps)


def architecture_of(plan: LayerPlan) -> str:
    """Return the architecture name of a family whose layers have this plan."""
    if plan.qk_norm:
        return "Qwen3ForCausalLM"
    return "Qwen2ForCausalLM" if plan.qkv_bias else "LlamaForCausalLM"


EAGLE = "The same module takes every draft step, over one cache."
VANILLA = """Each draft is made by the next module, which has its own cache. The cache holds the rows of the committed
text, then those of the earlier drafts. The hidden states of the latter are the outputs of the earlier modules."""


def save_modules(drafter: MtpDrafter, model: Qwen3ForCausalLM, folder: Path) -> None:
    """Save module i under `model.layers.{num_hidden_layers + i}.`; the config is the target's with the module's
    sizes."""
    target: dict[str, Any] = json.loads(model.config.to_json_string())
    plan, modules = drafter.shape.plan, drafter.chain()
    config = target | {
        "intermediate_size": plan.intermediate_size,
        "num_attention_heads": plan.num_heads,
        "num_key_value_heads": plan.num_kv_heads,
        "head_dim": plan.head_dim,
        "num_nextn_predict_layers": len(modules),
        "dtype": "bfloat16",
    }
    tensors: dict[str, Tensor] = {}
    for index, module in enumerate(modules, start=target["num_hidden_layers"]):
        tensors |= {f"model.layers.{index}.{name}": tensor for name, tensor in module.state_dict().items()}
    save_drafter(tensors, config, folder)


def load_modules(folder: Path, model: Qwen3ForCausalLM) -> MtpDrafter:
    """Load the saved modules for their target, with weights in float32."""
    tensors, config = load_drafter(folder)
    names = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    shape = qwen3_shape(model.config, LayerConfig(*(config[name] for name in names)))
    drafter = MtpDrafter(shape, config["num_nextn_predict_layers"], model.get_output_embeddings().weight)
    for index, module in enumerate(drafter.chain(), start=config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        module.load_state_dict({name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)})
    return drafter
