"""`drafter=eagle3`: a one-layer EAGLE-3 head (Li et al., 2025), stored under the names of SpecForge, SGLang and vLLM.

It reads three layers of the target at step 0, and its own hidden states afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.eagle3_checkpoint import Eagle3Config, default_tap_layer_inputs
from spec_lab.checkpoints.families import read_decoder
from spec_lab.checkpoints.plan import LayerPlan, RopeConfig
from spec_lab.checkpoints.taps import Tap, taps_of_inputs
from spec_lab.export.eagle3_json import write_eagle3_folder
from spec_lab.export.folders import in_bfloat16, load_drafter
from spec_lab.train.data import Texts
from spec_lab.train.head import LayerSizes, draft_vocabulary, vocabulary_maps
from spec_lab.train.layers import AttentionShape, RotaryFrequencies, SelfAttention, SwiGLU, TrainableRMSNorm
from spec_lab.train.target import FrozenTarget, TargetOutputs
from spec_lab.train.unrolled import Places, Unrolled, UnrolledModule, unroll_chain

NUM_TAPS = 3


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    """Sizes of a head; `hidden_size` and `vocab_size` are the target's.

    `norms_taps` and `norms_output` are EAGLE-3.1's: a norm for each tap before `fc`, and feeding back the output of the
    final norm.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=lambda: RopeConfig(10000.0, "none"))
    norms_taps: bool = False
    norms_output: bool = False

    def config(self, max_position_embeddings: int, num_target_layers: int) -> Eagle3Config:
        """Return the config of the head as others read it."""
        plan = LayerPlan(
            self.num_heads, self.num_kv_heads, self.head_dim, self.rope, intermediate_size=self.intermediate_size
        )
        layer = ModelConfig(
            family="llama",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=False,
            layers=(plan,),
            eos_token_ids=(),
            bos_token_id=None,
        )
        return Eagle3Config(
            layer=layer,
            target_hidden_size=self.hidden_size,
            draft_vocab_size=self.draft_vocab_size,
            target_vocab_size=self.vocab_size,
            tap_layer_inputs=default_tap_layer_inputs(num_target_layers),
            norm_before_residual=False,
            fc_norm=self.norms_taps,
            norm_output=self.norms_output,
        )


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads the embedding concatenated with the hidden state; a `ChainLayer`."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        attention = AttentionShape(2 * size, size, shape.num_heads, shape.num_kv_heads, head_dim=shape.head_dim)
        self.input_layernorm, self.hidden_norm = TrainableRMSNorm(size, eps), TrainableRMSNorm(size, eps)
        self.self_attn = SelfAttention(attention)
        self.post_attention_layernorm = TrainableRMSNorm(size, eps)
        self.mlp = SwiGLU(size, shape.intermediate_size)

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, torch.cat([self.input_layernorm(embeddings), self.hidden_norm(hidden)], dim=-1)

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Module(UnrolledModule):
    """The head, which is its own `ChainLayer`; `state_dict()` is the checkpoint."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: Eagle3Shape, draft_token_ids: Tensor) -> None:
        """`draft_token_ids` `[draft_vocab_size]`: the target ids that the head can draft, ascending."""
        super().__init__()
        assert draft_token_ids.shape == (shape.draft_vocab_size,) and bool((draft_token_ids.diff() > 0).all())
        self.shape = shape
        self.fc = nn.Linear(NUM_TAPS * shape.hidden_size, shape.hidden_size, bias=False)
        num_norms = NUM_TAPS if shape.norms_taps else 0
        self.fc_norm = nn.ModuleList(TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps) for _ in range(num_norms))
        self.midlayer = Eagle3Layer(shape)
        self.norm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        for name, tensor in vocabulary_maps(draft_token_ids, shape.vocab_size).items():
            self.register_buffer(name, tensor)
        self.rotary = RotaryFrequencies(shape.rope, shape.head_dim)

    @property
    def self_attn(self) -> SelfAttention:
        """The attention of its layer."""
        return self.midlayer.self_attn

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.enter(embeddings, hidden)

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the state to feed back: the layer's output, normed if `norms_output` is set."""
        hidden = self.midlayer.leave(residual, attended)
        return self.norm(hidden) if self.shape.norms_output else hidden

    def features(self, outputs: TargetOutputs) -> tuple[Tensor]:
        """Return the taps `[batch, rows, 3 * hidden]`."""
        return (outputs.tapped,)

    def draft_token_ids(self) -> Tensor:
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def draft_logits(self, state: Tensor) -> Tensor:
        return self.lm_head(state if self.shape.norms_output else self.norm(state))

    def unroll(self, embeddings: Tensor, features: tuple[Tensor, ...], num_steps: int, places: Places) -> list[Tensor]:
        (taps,) = features
        if self.shape.norms_taps:
            parts = taps.unflatten(-1, (NUM_TAPS, -1)).unbind(-2)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        rotation = self.rotary(places.positions)
        return unroll_chain(self, embeddings, self.fc(taps).float(), rotation, places.segments, num_steps)


@dataclass
class Eagle3(LayerSizes, Unrolled):
    """The knobs of an EAGLE-3 head.

    Attributes:
        draft_vocab_size: tokens that can be drafted, those that the target writes most; all if it has no more.
        norms_taps: a norm for each tapped state, as in EAGLE-3.1.
        norms_output: feed back the output of the final norm, as in EAGLE-3.1.
    """

    name: str = "eagle3"
    draft_vocab_size: int = 32_000
    norms_taps: bool = False
    norms_output: bool = False

    def taps(self, target: FrozenTarget) -> tuple[Tap, ...]:
        """Return the default of vLLM and SGLang, so that the config need not name them."""
        return taps_of_inputs(default_tap_layer_inputs(target.config.num_layers))

    def build(self, target: FrozenTarget, texts: Texts, seed: int) -> Eagle3Module:
        """Make a head. Its norm and LM head begin as the target's."""
        torch.manual_seed(seed)
        config, ids = target.config, draft_vocabulary(texts, target, self.draft_vocab_size)
        shape = Eagle3Shape(
            hidden_size=config.hidden_size,
            **self.filled(config.layers[-1]),
            vocab_size=config.vocab_size,
            draft_vocab_size=len(ids),
            rms_norm_eps=config.rms_norm_eps,
            rope=target.draft_rope,
            norms_taps=self.norms_taps,
            norms_output=self.norms_output,
        )
        head = Eagle3Module(shape, ids)
        head.norm.weight.data.copy_(target.final_norm_weight)
        head.lm_head.weight.data.copy_(target.head_weight[ids.to(target.device)])
        return head

    def save(self, module: Eagle3Module, target: FrozenTarget, folder: Path) -> None:
        config, tensors = target.config, in_bfloat16(module.state_dict())
        head = module.shape.config(config.max_position_embeddings, config.num_layers)
        write_eagle3_folder(
            folder, head, tensors, "hf", config.num_layers, num_drafts=self.num_unrolled_steps, target="target"
        )

    def load(self, folder: Path, target: FrozenTarget) -> Eagle3Module:
        tensors, config = load_drafter(folder)
        names = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
        same = ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "draft_vocab_size", "rms_norm_eps")
        shape = Eagle3Shape(
            **{name: config[names.get(name, name)] for name in (*same, *names)},
            rope=read_decoder(config, str(folder / "config.json")).only_layer.rope,
            norms_taps=config.get("fc_norm", False),
            norms_output=config.get("norm_output", False),
        )
        head = Eagle3Module(shape, tensors["d2t"] + torch.arange(shape.draft_vocab_size))
        head.load_state_dict(tensors)
        return head.to(target.device)

    def describe(self) -> str:
        return (
            "An EAGLE-3 head: one layer over the inputs of the target's layers 2, L // 2 and L - 3. Row p pairs the "
            "embedding of token p+1 with `fc` of the taps at p; the next step gets the layer's output."
        )
