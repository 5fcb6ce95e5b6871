"""`drafter=eagle3`: trains the head on the target's own generations, saves it as vLLM and SGLang load it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spec_lab.train.drafter import DraftMatcher
from spec_lab.train.eagle3 import RMS_NORM_EPS, ROPE_THETA, Eagle3Head, Eagle3Shape
from spec_lab.train.generations import Generations
from spec_lab.train.loop import CurvePoint, Optimisation, train
from spec_lab.train.target import features_and_logits

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


@dataclass(frozen=True, slots=True)
class Eagle3Recipe:
    """Size and training of the head.

    `num_unrolled_steps` of the training-time test; step i counts `step_loss_decay ** i`.
    """

    name: str
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    num_unrolled_steps: int
    step_loss_decay: float
    optimisation: Optimisation

    def train(
        self,
        model: Qwen3ForCausalLM,
        generations: Generations,
        always_drafted: list[int],
        folder: Path,
        checkpoint: Path,
        seed: int,
        device: torch.device,
    ) -> list[CurvePoint]:
        """See `DrafterRecipe`."""
        torch.manual_seed(seed)
        vocab_size = model.config.vocab_size
        draft_token_ids = most_frequent_tokens(generations, vocab_size, self.draft_vocab_size, always_drafted)
        head = Eagle3Head(self._shape(model), draft_token_ids).to(device)
        generations = generations.to(device)

        def batch_of(step: int) -> tuple[Tensor, ...]:
            picked = generations.batch(step, self.optimisation.batch_size, seed)
            return unrolling_batch(model, head, picked)

        loss = UnrolledLoss(head, self.num_unrolled_steps, self.step_loss_decay)
        curve = train(loss, batch_of, self.optimisation, checkpoint, device)
        save_head(head, model.config.max_position_embeddings, folder)
        return curve

    def matcher(self, folder: Path, model: Qwen3ForCausalLM, device: torch.device) -> DraftMatcher:
        """See `DrafterRecipe`. Computes in float32."""
        head = load_head(folder).to(device).eval()
        target_ids = head.draft_token_ids()

        @torch.no_grad()
        def match(tokens: Tensor, num_draft_tokens: int) -> Tensor:
            features, _ = features_and_logits(model, tokens)
            embeddings = model.get_input_embeddings()(tokens[:, 1:])
            states = head.unroll(embeddings, features[:, :-1], num_draft_tokens)
            matches = torch.zeros(*tokens.shape, num_draft_tokens, dtype=torch.bool, device=device)
            for step, state in enumerate(states):
                # Row p of this step drafts token p+2 for the anchor p-step.
                drafts = target_ids[head.draft_logits(state).argmax(-1)]
                agrees = drafts[:, step:-1] == tokens[:, step + 2 :]
                matches[:, : agrees.shape[1], step] = agrees
            return matches

        return match

    def _shape(self, model: Qwen3ForCausalLM) -> Eagle3Shape:
        return Eagle3Shape(
            hidden_size=model.config.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=model.config.vocab_size,
            draft_vocab_size=self.draft_vocab_size,
        )


def most_frequent_tokens(
    generations: Generations, vocab_size: int, draft_vocab_size: int, always_drafted: list[int]
) -> Tensor:
    """`[draft_vocab_size]`: the ids the target writes most, `always_drafted` among them, ascending."""
    if not len(always_drafted) <= draft_vocab_size <= vocab_size:
        raise ValueError(
            f"draft_vocab_size={draft_vocab_size} must lie between the markers and the {vocab_size} tokens"
        )
    counts = generations.count_written_tokens(vocab_size)
    counts[always_drafted] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:draft_vocab_size].sort().values


@torch.no_grad()
def unrolling_batch(model: Qwen3ForCausalLM, head: Eagle3Head, picked: Generations) -> tuple[Tensor, ...]:
    """Inputs of `UnrolledLoss` from generated rows, `[batch, length - 1, ...]` each.

    Row p stands for drafting token p+2, so its label is the target's distribution at position p+1. Rows before the last
    prompt position draft nothing, and neither do those whose token lies behind the text's end.
    """
    tokens = picked.tokens.long()
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=tokens.device.type == "cuda"):
        features, logits = features_and_logits(model, tokens)
    probabilities = torch.softmax(logits[:, 1:].float(), dim=-1)[..., head.draft_token_ids()]
    row = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    ends_in_text = row + 2 < picked.lengths[:, None]
    first_anchor = picked.prompt_lengths[:, None] - 1
    embeddings = model.get_input_embeddings()(tokens[:, 1:])
    return embeddings, features[:, :-1], probabilities, ends_in_text, row - first_anchor


class UnrolledLoss(nn.Module):
    """Cross-entropy between the target's distribution and the head's over every step of the training-time test.

    Probability outside the draft vocabulary is dropped and not renormalised: a row counts by the mass it could match.
    """

    def __init__(self, head: Eagle3Head, num_steps: int, step_loss_decay: float) -> None:
        super().__init__()
        self.head = head
        self.num_steps = num_steps
        self.step_loss_decay = step_loss_decay

    def forward(
        self, embeddings: Tensor, features: Tensor, probabilities: Tensor, ends_in_text: Tensor, from_first: Tensor
    ) -> Tensor:
        """See `unrolling_batch`; `from_first` is the row's distance from the first anchor."""
        total = torch.zeros((), device=embeddings.device)
        sum_weights = 0.0
        for step, state in enumerate(self.head.unroll(embeddings, features, self.num_steps)):
            row_loss = -(probabilities * self.head.draft_logits(state).float().log_softmax(-1)).sum(-1)
            counts = (ends_in_text & (from_first >= step)).float()
            weight = self.step_loss_decay**step
            total = total + weight * (row_loss * counts).sum() / counts.sum().clamp(min=1)
            sum_weights += weight
        return total / sum_weights


def head_config(shape: Eagle3Shape, max_position_embeddings: int) -> dict[str, object]:
    """config.json. No tap ids: vLLM and SGLang count them differently, and agree on the default we use."""
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
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": max_position_embeddings,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def save_head(head: Eagle3Head, max_position_embeddings: int, folder: Path) -> None:
    """`config.json` and `model.safetensors`: matrices and norms in bf16, the vocabulary maps as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous().cpu()
        for name, tensor in head.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(head_config(head.shape, max_position_embeddings), indent=2) + "\n")


def load_head(folder: Path) -> Eagle3Head:
    """The saved head, its weights held in float32."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    shape = Eagle3Shape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
    )
    head = Eagle3Head(shape, tensors["d2t"] + torch.arange(shape.draft_vocab_size))
    head.load_state_dict(tensors)
    return head
