"""`drafter=p_eagle`: trains a P-EAGLE head on the target's own texts, and saves it in the layout of speculators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from spec_lab.checkpoints.eagle3_checkpoint import eagle3_tensor_shapes, load_eagle3
from spec_lab.checkpoints.eagle3_config import Eagle3Config, default_tap_layer_inputs
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.checkpoints.random_weights import random_tensors
from spec_lab.checkpoints.taps import Tap, taps_of_inputs
from spec_lab.train.block_config import PEagleTrainingConfig
from spec_lab.train.blocks.p_eagle import TrainablePEagle
from spec_lab.train.blocks.slot_recipe import SlotRecipe
from spec_lab.train.blocks.training import block_loss_words
from spec_lab.train.checkpoint import load_drafter, save_drafter
from spec_lab.train.drafter import DrafterDescription
from spec_lab.train.eagle3_recipe import CountedTexts, rope_keys
from spec_lab.train.frozen_target import FrozenTarget, draft_rope, full_plan
from spec_lab.train.layouts import in_speculators, speculators_config


@dataclass(frozen=True, slots=True)
class PEagleRecipe(SlotRecipe):
    """Trains a P-EAGLE head."""

    config: PEagleTrainingConfig

    def build(
        self, target: FrozenTarget, texts: CountedTexts, seed: int, always_drafted: Sequence[int] = ()
    ) -> TrainablePEagle:
        """Make an untrained drafter. Its last norm, and the output head of a reduced vocabulary, are
        initialised from the target's."""
        vocab_size = target.config.vocab_size
        kept = self.vocabulary(target, texts, [*target.config.eos_token_ids, *always_drafted])
        if kept:
            ids = kept["d2t"] + torch.arange(len(kept["d2t"]))
            kept["lm_head.weight"] = target.head_weight[ids.to(target.device)].float().cpu()  # a copy, which is trained
        num_drafted = len(kept["d2t"]) if kept else vocab_size
        config = self._sizes(target, num_drafted, self.mask_token(texts, vocab_size))
        shapes = eagle3_tensor_shapes(config)
        for name in ("embed_tokens.weight", "lm_head.weight"):  # the target's are used, or the copy above
            del shapes[name]
        tensors = random_tensors(shapes, torch.float32, torch.device("cpu"), seed)
        tensors["norm.weight"] = target.final_norm_weight.float().cpu()
        return TrainablePEagle(config, self.config.num_drafts, tensors | kept, target)

    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        """Return the taps of an EAGLE-3 head."""
        return taps_of_inputs(default_tap_layer_inputs(target.config.num_layers))

    def save(self, drafter: TrainablePEagle, target: FrozenTarget, folder: Path) -> None:
        """Write it in the layout of speculators, which vLLM reads."""
        config = drafter.config
        layer = {**decoder_keys(config), **rope_keys(config.layer.only_layer.rope)}
        keys = {
            **speculators_config("peagle", layer, self.taps(target), "target", drafter.num_slots),
            "draft_vocab_size": config.draft_vocab_size,
            "norm_before_residual": False,
            "mask_token_id": config.mask_token_id,
        }
        save_drafter({in_speculators(name): tensor for name, tensor in drafter.tensors().items()}, keys, folder)

    def load(self, folder: Path, target: FrozenTarget) -> TrainablePEagle:
        """Read what `save` wrote, its weights held in float32."""
        config, tensors = load_eagle3(folder, target.config, torch.float32, "cpu", "peagle")
        return TrainablePEagle(config, self.config.num_drafts, tensors, target).to(target.device)

    def describe(self, folder: Path) -> DrafterDescription:
        """Describe the drafter for its card; see `DrafterRecipe`."""
        _, config = load_drafter(folder)
        return DrafterDescription(
            kind="a P-EAGLE head",
            reading=f"""It reads what an EAGLE-3 head reads, has {self.config.num_layers} layers, and drafts
{config["draft_vocab_size"]} tokens. The first of its {self.config.num_drafts} drafts is made by the newest row, each
other one by a mask row behind it, all in one pass. Embedding and output head are the target's where the file has
none.""",
            loss=block_loss_words(self.config),
        )

    def _sizes(self, target: FrozenTarget, draft_vocab_size: int, mask_token_id: int) -> Eagle3Config:
        model, like = target.config, full_plan(target.config)
        plan = LayerPlan(
            like.num_heads,
            like.num_kv_heads,
            like.head_dim,
            rope=draft_rope(model),
            intermediate_size=like.intermediate_size,
        )
        return Eagle3Config(
            layer=replace(model, family="llama", layers=(plan,), gemma4=None, max_dense_positions=None),
            target_hidden_size=model.hidden_size,
            draft_vocab_size=draft_vocab_size,
            target_vocab_size=model.vocab_size,
            tap_layer_inputs=None,
            norm_before_residual=False,
            more_layers=(plan,) * (self.config.num_layers - 1),
            mask_token_id=mask_token_id,
        )


def decoder_keys(config: Eagle3Config) -> dict[str, object]:
    """Return the keys of config.json that describe its layers, except those of RoPE."""
    layer, plan = config.layer, config.layer.only_layer
    return {
        "model_type": "llama",
        "hidden_size": layer.hidden_size,
        "intermediate_size": plan.intermediate_size,
        "num_hidden_layers": 1 + len(config.more_layers),
        "num_attention_heads": plan.num_heads,
        "num_key_value_heads": plan.num_kv_heads,
        "head_dim": plan.head_dim,
        "vocab_size": layer.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "max_position_embeddings": layer.max_position_embeddings,
        "tie_word_embeddings": False,
    }
