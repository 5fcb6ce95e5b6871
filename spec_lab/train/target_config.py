"""The schemas of `target=` of a training: one for each existing target, and one for each that can be trained here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from spec_lab.menu.config import knob
from spec_lab.train.module_config import (
    MAX_LENGTH,
    LayerConfig,
    OptimisationConfig,
    depth,
    width_of_layers,
)


@dataclass
class TargetChoice:
    """The keys that every option of `target` has: none."""

    writes_texts: ClassVar[bool] = True
    """Whether drafters are trained on texts that the target writes; else on the target's training corpus."""
    own_vocabulary: ClassVar[bool] = True
    """Whether a new target has its own vocabulary; else the shipped target's."""

    def to_train(self) -> NewTargetConfig | None:
        """Return the target's training config; None for an existing target."""
        return None


@dataclass
class ShippedTarget(TargetChoice):
    """target=shipped: the existing one in `spec_lab/zoo/pocket`."""


@dataclass
class FrozenTargetChoice(TargetChoice):
    """The keys of an existing target of any family, which the lab's own engine runs."""

    path: str | None = knob(None, "folder of a Hugging Face checkpoint, or a GGUF file")


@dataclass
class HfTarget(FrozenTargetChoice):
    """target=hf: a checkpoint of a family in docs/families.md."""


@dataclass
class SmolLm2Target(FrozenTargetChoice):
    """target=smollm2_135m: SmolLM2-135M-Instruct, from its package or from `target.path`."""


@dataclass
class NewTargetConfig(TargetChoice):
    """The keys of every target that is trained here."""

    option: ClassVar[str]
    """The name of the option, and of the target's folder."""

    hidden_size: int = width_of_layers(192)
    num_layers: int = depth(8)
    natural_fraction: float = knob(
        0.08, "share of code and prose in a batch; the rest is generated examples", least=0, most=1
    )
    optimisation: OptimisationConfig = field(default_factory=OptimisationConfig, metadata={"help": "how it is trained"})

    def to_train(self) -> NewTargetConfig:
        return self

    def key_value_heads(self) -> int:
        """Return the number of KV heads; 1 for latent attention."""
        return int(getattr(self, "num_kv_heads", 1))


@dataclass
class PocketTrainingConfig(LayerConfig, NewTargetConfig):
    """target=pocket: a new target of the Qwen3 architecture."""

    option: ClassVar[str] = "pocket"

    hidden_size: int = width_of_layers(256)


@dataclass
class DecoderTrainingConfig(NewTargetConfig):
    """The keys of targets of families other than Qwen3. Their drafters learn from the training corpus."""

    writes_texts: ClassVar[bool] = False
    own_vocabulary: ClassVar[bool] = False

    drafter_natural_fraction: float = knob(0.4, "share of code and prose in a batch for the drafter", least=0, most=1)


@dataclass
class PocketHybridTrainingConfig(LayerConfig, DecoderTrainingConfig):
    """target=pocket_hybrid: a new target of the Qwen3.5 architecture, mostly gated delta nets."""

    option: ClassVar[str] = "pocket_hybrid"

    full_attention_every: int = knob(4, "interval of the layers with attention; the others have delta nets", least=1)
    num_key_heads: int = knob(2, "number of heads of a delta net's queries and keys", least=1, most=1024)
    num_value_heads: int = knob(
        4, "number of heads of a delta net's values, a multiple of num_key_heads", least=1, most=1024
    )
    key_head_dim: int = knob(32, "width of a head of a delta net's keys", least=1, most=1024)
    value_head_dim: int = knob(64, "width of a head of a delta net's values", least=1, most=1024)


@dataclass
class PocketGemmaTrainingConfig(LayerConfig, DecoderTrainingConfig):
    """target=pocket_gemma: a new target of the Gemma 4 architecture, like E2B."""

    option: ClassVar[str] = "pocket_gemma"

    full_attention_every: int = knob(4, "interval of the layers with full attention; the others have a window", least=1)
    full_head_dim: int = knob(64, "width of a head in layers with full attention, an even number", least=2, most=1024)
    window: int = knob(64, "number of keys in the window of the other layers", least=1, most=MAX_LENGTH)
    num_shared_layers: int = knob(4, "number of last layers that read the KV of earlier ones", least=0, most=1023)
    per_layer_width: int = knob(16, "width of each layer's own embedding", least=1, most=2**16)


@dataclass
class PocketMoeTrainingConfig(DecoderTrainingConfig):
    """target=pocket_moe: a new target of the DeepSeek-V3 architecture, with experts and latent attention."""

    option: ClassVar[str] = "pocket_moe"

    intermediate_size: int = knob(384, "width of the first layer's feed-forward network", least=1, most=2**18)
    num_heads: int = knob(4, "heads of a layer", least=1, most=1024)
    kv_lora_rank: int = knob(64, "number of latent numbers that are cached for a token", least=1, most=2**14)
    qk_nope_head_dim: int = knob(32, "channels of a query that are not rotated", least=1, most=1024)
    qk_rope_head_dim: int = knob(16, "channels of a query that are rotated, an even number", least=2, most=1024)
    v_head_dim: int = knob(32, "width of a head's values", least=1, most=1024)
    num_experts: int = knob(16, "number of experts of each layer after the first", least=2, most=1024)
    num_chosen: int = knob(2, "number of experts that a token uses", least=1, most=1024)
    expert_size: int = knob(40, "width of an expert, and of the shared expert", least=1, most=2**16)
