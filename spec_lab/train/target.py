"""The pocket target: a small Qwen3 in transformers' own code, trained on packed rows, saved in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from spec_lab.core.errors import UserError
from spec_lab.corpus.example import END_OF_TEXT, END_OF_TURN
from spec_lab.train.data import TrainingTokens, next_token_loss
from spec_lab.train.generate import Continuation, generate
from spec_lab.train.loop import CurvePoint, train
from spec_lab.train.module_config import MAX_LENGTH
from spec_lab.train.target_config import PocketTrainingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True, slots=True)
class TargetDescription:
    """A target's part of its card: whose architecture it has, as in "A ...-architecture language model", and what its
    layers are, to stand behind their number."""

    architecture: str
    layers: str


class NewTarget(Protocol):
    """Size and training of one kind of target: an option of the `target` group."""

    def train(
        self,
        tokenizer: PreTrainedTokenizerFast,
        corpus: Path,
        folder: Path,
        checkpoint: Path,
        seed: int,
        device: torch.device,
    ) -> list[CurvePoint]:
        """Train on the token files in `corpus` and save the model to `folder`; return the loss curve."""

    def load(self, folder: Path, device: torch.device) -> tuple[Any, PreTrainedTokenizerFast]:
        """Load the saved target, its weights held in float32, and its tokenizer; frozen."""

    def write(self, model: Any, prompts: list[list[int]], max_new_tokens: int, batch_size: int) -> list[Continuation]:
        """Continue prompts greedily."""

    def describe(self, folder: Path) -> TargetDescription:
        """Return what the card says of the saved model; all share data, curve, evaluation and limits."""


@dataclass(frozen=True, slots=True)
class TargetRecipe:
    """Trains a target on generated examples and natural text."""

    config: PocketTrainingConfig

    def model_config(self, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
        """Return a config with tied embeddings, whose texts end at the end of a turn or of a text."""
        from transformers import Qwen3Config

        return Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=self.config.hidden_size,
            intermediate_size=self.config.intermediate_size,
            num_hidden_layers=self.config.num_layers,
            num_attention_heads=self.config.num_heads,
            num_key_value_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TURN),
            pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        )

    def train(
        self,
        tokenizer: PreTrainedTokenizerFast,
        corpus: Path,
        folder: Path,
        checkpoint: Path,
        seed: int,
        device: torch.device,
    ) -> list[CurvePoint]:
        """Train on the token files in `corpus` and save the model to `folder`; return the loss curve."""
        from transformers import Qwen3ForCausalLM

        torch.manual_seed(seed)
        end_of_text_id = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        tokens = TrainingTokens.load(corpus, self.config.natural_fraction, end_of_text_id, device)
        model = Qwen3ForCausalLM(self.model_config(tokenizer))

        def batch_of(step: int) -> tuple[Tensor, Tensor]:
            return tokens.labelled_batch(step, self.config.optimisation.batch_size, seed)

        curve = train(NextTokenLoss(model), batch_of, self.config.optimisation, checkpoint, device)
        save_target(model, tokenizer, folder)
        return curve

    def load(self, folder: Path, device: torch.device) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
        """Return the saved target and its tokenizer, as `load_target` returns them."""
        return load_target(folder, device)

    def write(
        self, model: Qwen3ForCausalLM, prompts: list[list[int]], max_new_tokens: int, batch_size: int
    ) -> list[Continuation]:
        """Continue prompts greedily, with a cache."""
        return generate(model, prompts, max_new_tokens, batch_size)

    def describe(self, folder: Path) -> TargetDescription:
        """Say for the card what `NewTarget` asks."""
        config = self.config
        return TargetDescription(
            "Qwen3",
            f"feed-forward {config.intermediate_size}, {config.num_heads} query and {config.num_kv_heads} key-value "
            f"heads of {config.head_dim}",
        )


class NextTokenLoss(nn.Module):
    """Mean cross-entropy of the next token over rows `[batch, length]` and labels `[batch, length - 1]`."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        # A ready mapping of masks keeps transformers from building one: plain causal attention needs none.
        logits = self.model(input_ids=rows, attention_mask={"full_attention": None}, use_cache=False).logits
        return next_token_loss(logits, labels)


def save_target(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save weights in bf16 and generation settings, as AutoModelForCausalLM loads them."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.convert_tokens_to_ids(END_OF_TURN), tokenizer.convert_tokens_to_ids(END_OF_TEXT)],
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        do_sample=False,
    )
    model.to(torch.bfloat16).save_pretrained(folder)


def load_target(folder: Path, device: torch.device) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Load the saved target, its bf16 weights held in float32, and its tokenizer; frozen."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        .to(device)
        .eval()
        .requires_grad_(False)
    )
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars of loading and saving among the lines that a training logs."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def tapped_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers whose inputs an EAGLE-3 head reads when its config names none (vLLM's and SGLang's default)."""
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise UserError(f"num_layers={num_layers} leaves the head fewer than three different taps; use 7 or more")
    return taps


@dataclass(frozen=True, slots=True)
class TargetOutputs:
    """The outputs that one forward over rows `[batch, length]` leaves for drafters to read.

    `layer_inputs`: of every layer, `[batch, length, hidden]`. `final_hidden` `[batch, length, hidden]`: after the last
    norm, what the LM head reads. `keys_values`: of every layer, `[batch, num_kv_heads, length, head_dim]` each, the
    keys normed and rotated, as the target's cache holds them.
    """

    layer_inputs: tuple[Tensor, ...]
    final_hidden: Tensor
    logits: Tensor
    keys_values: tuple[tuple[Tensor, Tensor], ...]

    def taps(self) -> Tensor:
        """Return `[batch, length, 3 * hidden]`: the inputs of the tapped layers side by side."""
        return torch.cat([self.layer_inputs[layer] for layer in tapped_layers(len(self.layer_inputs))], dim=-1)


@torch.no_grad()
def run_target(model: Qwen3ForCausalLM, tokens: Tensor) -> TargetOutputs:
    """Run one causal forward over rows `[batch, length]`, positions 0.. each."""
    # The mask as for training: none. The cache comes for the price of a copy.
    output = model(input_ids=tokens, attention_mask={"full_attention": None}, use_cache=True, output_hidden_states=True)
    # hidden_states[i] is the input of layer i; entry 0 is the embedding, the last one the final norm's output.
    *layer_inputs, final_hidden = output.hidden_states
    keys_values = tuple((layer.keys, layer.values) for layer in output.past_key_values.layers)
    return TargetOutputs(tuple(layer_inputs), final_hidden, output.logits, keys_values)
