"""`drafter=mtp_eagle`: trains a multi-token-prediction module with plain attention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.checkpoints.taps import Tap
from spec_lab.train.checkpoint import load_drafter, save_drafter
from spec_lab.train.drafter import DrafterDescription
from spec_lab.train.drafter_config import MtpTrainingConfig
from spec_lab.train.eagle3_recipe import rope_keys
from spec_lab.train.frozen_target import FrozenTarget, draft_rope, full_plan
from spec_lab.train.head_recipe import PackedForm
from spec_lab.train.mtp import ModuleShape, MtpDrafter
from spec_lab.train.packed_rows import TrainingTexts
from spec_lab.train.unroll import unrolled_loss_words
from spec_lab.train.unrolled_form import UNROLLED

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class MtpRecipe:
    """Trains an MTP module, which takes every step, on the target's own texts."""

    config: MtpTrainingConfig

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
        drafter = MtpDrafter(self._planned(target), target.head_weight)
        drafter.module.shared_head.norm.weight.data.copy_(target.final_norm_weight)
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
        tensors = {f"{prefix}{name}": tensor for name, tensor in drafter.module.state_dict().items()}
        save_drafter(tensors, keys, folder)

    def load(self, folder: Path, target: FrozenTarget) -> MtpDrafter:
        """Read what `save` wrote, its weights held in float32."""
        tensors, _ = load_drafter(folder)
        prefix = f"model.layers.{target.config.num_layers}."
        drafter = MtpDrafter(self._planned(target), target.head_weight)
        drafter.module.load_state_dict({name.removeprefix(prefix): it for name, it in tensors.items()})
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

    def describe(self, folder: Path) -> DrafterDescription:
        """Describe the drafter for its card; see `DrafterRecipe`."""
        _, config = load_drafter(folder)
        family = config["architectures"][0].removesuffix("ForCausalLM")
        return DrafterDescription(
            kind="an MTP module",
            reading=f"""It has one layer of {family} with
{config["num_attention_heads"]} query and {config["num_key_value_heads"]} key-value heads and feed-forward
{config["intermediate_size"]}, and drafts the whole
vocabulary with the target's own embedding and head, which are not in the file.

Row p pairs the target's embedding of token p+1 with its final hidden state at p, after the norm, at rotary position
p: `eh_proj` reads the embedding's half first. The next step gets the module's own state after `shared_head.norm`. The
same module takes every draft step, over one cache.""",
            loss=unrolled_loss_words(self.config),
        )


def architecture_of(plan: LayerPlan) -> str:
    """Return the architecture name of a family whose layers have this plan."""
    if plan.qk_norm:
        return "Qwen3ForCausalLM"
    return "Qwen2ForCausalLM" if plan.qkv_bias else "LlamaForCausalLM"
