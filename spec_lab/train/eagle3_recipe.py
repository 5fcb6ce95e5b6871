"""`drafter=eagle3`: trains the head on the target's own generations, and saves it in the form of vLLM and SGLang."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from spec_lab.checkpoints.eagle3_config import default_tap_layer_inputs
from spec_lab.checkpoints.families.plain import read_rope
from spec_lab.checkpoints.json_input import ConfigFields
from spec_lab.checkpoints.plan import RopeConfig
from spec_lab.checkpoints.taps import Tap, taps_of_inputs
from spec_lab.core.errors import UserError
from spec_lab.train.checkpoint import load_drafter, save_drafter
from spec_lab.train.drafter import DrafterDescription
from spec_lab.train.drafter_config import Eagle3TrainingConfig
from spec_lab.train.eagle3 import Eagle3Shape, TrainableEagle3Head
from spec_lab.train.frozen_target import FrozenTarget, draft_rope
from spec_lab.train.head_recipe import PackedForm
from spec_lab.train.packed_rows import TrainingTexts
from spec_lab.train.unroll import unrolled_loss_words
from spec_lab.train.unrolled_form import UNROLLED

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class Eagle3Recipe:
    """Trains an EAGLE-3 head on the target's own texts, over the steps of the training-time test."""

    config: Eagle3TrainingConfig

    @property
    def form(self) -> PackedForm:
        return UNROLLED

    def build(self, target: FrozenTarget, texts: TrainingTexts, seed: int) -> TrainableEagle3Head:
        """Make a head for a frozen target; see `HeadRecipe`. Its norm and LM head are initialised from the target's."""
        torch.manual_seed(seed)
        config = target.config
        draft_token_ids = most_frequent_tokens(
            texts, config.vocab_size, self.config.draft_vocab_size, always_drafted=list(config.eos_token_ids)
        )
        shape = Eagle3Shape(
            hidden_size=config.hidden_size,
            **asdict(self.config.sizes),
            vocab_size=config.vocab_size,
            draft_vocab_size=self.config.draft_vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            rope=draft_rope(config),
            norms_taps=self.config.norms_taps,
            norms_output=self.config.norms_output,
        )
        head = TrainableEagle3Head(shape, draft_token_ids)
        head.norm.weight.data.copy_(target.final_norm_weight)
        head.lm_head.weight.data.copy_(target.head_weight[draft_token_ids.to(target.device)])
        return head

    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        """Return its taps: the default of vLLM and SGLang, so that its config need not name them."""
        return taps_of_inputs(default_tap_layer_inputs(target.config.num_layers))

    def save(self, drafter: TrainableEagle3Head, target: FrozenTarget, folder: Path) -> None:
        """Write the head in the form that this engine, vLLM and SGLang load."""
        save_head(drafter, target.config.max_position_embeddings, folder)

    def load(self, folder: Path, target: FrozenTarget) -> TrainableEagle3Head:
        """Read what `save` wrote, its weights held in float32."""
        return load_head(folder).to(target.device)

    def describe(self, folder: Path) -> DrafterDescription:
        """Describe the drafter for its card; see `DrafterRecipe`."""
        _, config = load_drafter(folder)
        normed = "normed (`fc_norm`) " if config.get("fc_norm") else ""
        fed_back = "after the final norm (`norm_output`)" if config.get("norm_output") else "before the final norm"
        return DrafterDescription(
            kind="an EAGLE-3 head",
            reading=f"""It reads the inputs of the target's layers 2, L // 2 and L - 3 (the default of vLLM and SGLang,
so the config names none), has one layer with {config["num_attention_heads"]} query and
{config["num_key_value_heads"]} key-value heads and feed-forward {config["intermediate_size"]}, and drafts
{config["draft_vocab_size"]} of the target's {config["vocab_size"]} tokens: those the target writes most, and
those that end a text.

Row p pairs the target's embedding of token p+1 with `fc` of the {normed}taps at p, at rotary position p. The residual
is the raw `fc` output (`norm_before_residual` false). The next step gets the layer's output {fed_back}.""",
            loss=unrolled_loss_words(self.config),
        )


class CountedTexts(Protocol):
    """Texts with a count of the tokens that the target wrote."""

    def count_written_tokens(self, vocab_size: int) -> Tensor:
        """Return how often the target wrote each token, `[vocab_size]`."""


def most_frequent_tokens(
    texts: CountedTexts, vocab_size: int, draft_vocab_size: int, always_drafted: list[int]
) -> Tensor:
    """Return `[draft_vocab_size]` ascending ids: `always_drafted`, and those that the target wrote most often."""
    if not len(always_drafted) <= draft_vocab_size <= vocab_size:
        raise UserError(
            f"drafter.draft_vocab_size={draft_vocab_size} must be between the {len(always_drafted)} tokens that are "
            f"always drafted and the {vocab_size} of the target"
        )
    counts = texts.count_written_tokens(vocab_size)
    counts[always_drafted] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:draft_vocab_size].sort().values


def head_config(shape: Eagle3Shape, max_position_embeddings: int) -> dict[str, object]:
    """Return config.json. It has no tap ids, since vLLM and SGLang number them differently but agree on our default."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        **rope_keys(shape.rope),
        "max_position_embeddings": max_position_embeddings,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "norm_before_residual": False,
        **({"fc_norm": True} if shape.norms_taps else {}),
        **({"norm_output": True} if shape.norms_output else {}),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def rope_keys(rope: RopeConfig) -> dict[str, object]:
    """Return the keys of config.json for the RoPE of a head's layer."""
    if rope.scaling == "none":
        return {"rope_theta": rope.theta}
    scaling: dict[str, object] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def save_head(head: TrainableEagle3Head, max_position_embeddings: int, folder: Path) -> None:
    """Save matrices and norms in bf16, and vocabulary maps unchanged."""
    save_drafter(head.state_dict(), head_config(head.shape, max_position_embeddings), folder)


def load_head(folder: Path) -> TrainableEagle3Head:
    """Load the saved head, its weights held in float32."""
    tensors, config = load_drafter(folder)
    shape = Eagle3Shape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        rms_norm_eps=config["rms_norm_eps"],
        rope=read_rope(ConfigFields(config, str(folder / "config.json")), config["max_position_embeddings"]),
        norms_taps=config.get("fc_norm", False),
        norms_output=config.get("norm_output", False),
    )
    head = TrainableEagle3Head(shape, tensors["d2t"] + torch.arange(shape.draft_vocab_size))
    head.load_state_dict(tensors)
    return head
