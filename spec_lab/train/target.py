"""Pocket targets: small models of several families in transformers' own classes, trained on packed rows and
natural text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spec_lab.checkpoints.checkpoint import run_dtype
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.eagle3_config import default_tap_layer_inputs
from spec_lab.checkpoints.families.table import read_decoder
from spec_lab.corpus.example import END_OF_TEXT, END_OF_TURN
from spec_lab.train.data import TrainingTokens, next_token_loss
from spec_lab.train.experts import EVERY_EXPERT, every_expert
from spec_lab.train.loop import CurvePoint, train
from spec_lab.train.packed_attention import window_rows
from spec_lab.train.target_config import NewTargetConfig
from spec_lab.train.target_kinds import KINDS, TargetKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class TargetDescription:
    """A target's part of its card: the name of its architecture, and a description of its layers.

    The card puts the description after the number of layers.
    """

    architecture: str
    layers: str


@dataclass(frozen=True, slots=True)
class TargetRecipe:
    """Trains a target of one of the `KINDS` on generated examples and natural text."""

    config: NewTargetConfig

    @property
    def kind(self) -> TargetKind:
        return KINDS[self.config.option]

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
        torch.manual_seed(seed)
        end_of_text_id = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        tokens = TrainingTokens.load(corpus, self.config.natural_fraction, end_of_text_id, device)
        ends = {"eos_token_id": tokenizer.convert_tokens_to_ids(END_OF_TURN), "pad_token_id": end_of_text_id}
        model = new_model(self.kind.keys(self.config, len(tokenizer)) | ends)
        self.kind.prepare(model)
        loss, how = NextTokenLoss(model), self.config.optimisation

        def batch_of(step: int) -> tuple[Tensor, Tensor]:
            return tokens.labelled_batch(step, how.batch_size, seed)

        with products_in_tf32():
            curve = train(
                loss,
                batch_of,
                how,
                checkpoint,
                device,
                compiled=NextTokenLoss.compiled,
                in_16_bits=self.kind.in_16_bits,
            )
        save_target(model, tokenizer, folder)
        return curve

    def describe(self, folder: Path) -> TargetDescription:
        """Return the card's description of the saved model. Data, curve, evaluation and limits are described
        elsewhere."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return TargetDescription(self.kind.architecture, self.kind.layers(config))


def new_model(keys: dict[str, Any], **how: str) -> Any:
    """Make the model of a config.json with `keys`, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys), **how, **with_every_expert())


def with_every_expert() -> dict[str, str]:
    """Return the keyword that tells transformers how to compute a model's experts."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EVERY_EXPERT, every_expert)
    return {"experts_implementation": EVERY_EXPERT}


@contextmanager
def products_in_tf32() -> Iterator[None]:
    """Let float32 products run on a GPU's tensor cores, with inputs rounded to 10 bits of mantissa."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class NextTokenLoss(nn.Module):
    """Mean cross-entropy of the next token over rows `[batch, length]` and labels `[batch, length - 1]`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._loss_of = next_token_loss

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        masks = causal_masks(self.model.config, rows)
        return self._loss_of(self.model(input_ids=rows, attention_mask=masks, use_cache=False).logits, labels)

    def compiled(self) -> NextTokenLoss:
        """Compile layer by layer, and return this module.

        Layers of one kind are compiled only once. Compiling the whole model would take a minute.
        """
        for layer in self.model.model.layers:
            layer.compile()
        self._loss_of = torch.compile(next_token_loss)
        return self


def causal_masks(config: Any, rows: Tensor) -> dict[str, Tensor | None] | Tensor:
    """Return the masks of each kind of layer, or one for all, for rows `[batch, length]`, each seen as one document.

    Without given masks, transformers would make its own, and wait for the device to see whether rows are packed. Plain
    causal attention and layers with a state need no mask, so a mapping by kind of layer has None for them. A model
    without kinds of layers takes only a tensor, so it gets a causal mask.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return window_rows(rows.shape[1], None, rows.device)[None, None]
    masks: dict[str, Tensor | None] = dict.fromkeys(kinds)
    if "sliding_attention" in masks:
        masks["sliding_attention"] = window_rows(rows.shape[1], config.sliding_window, rows.device)[None, None]
    return masks


def save_target(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save weights and generation settings for AutoModelForCausalLM, in bf16, except weights that the engine always
    keeps in float32."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.convert_tokens_to_ids(END_OF_TURN), tokenizer.convert_tokens_to_ids(END_OF_TEXT)],
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        do_sample=False,
    )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = tensor.to(run_dtype(name, torch.bfloat16))
    model.save_pretrained(folder)


def load_target(folder: Path, device: torch.device) -> tuple[Any, PreTrainedTokenizerFast]:
    """Load the saved target, frozen, with its bf16 weights in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = (
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, **with_every_expert()
        )
        .to(device)
        .eval()
        .requires_grad_(False)
    )
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def sizes_of(model: PreTrainedModel) -> ModelConfig:
    """Return the sizes that the engine reads from the model's config.json."""
    return read_decoder(json.loads(model.config.to_json_string()), "the target's config.json")


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Switch off transformers' progress bars, which would mix with the log of a training."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@dataclass(frozen=True, slots=True)
class TargetOutputs:
    """The outputs of one forward over rows `[batch, length]` that drafters read.

    `layer_inputs`: of every layer, `[batch, length, hidden]`. `final_hidden` `[batch, length, hidden]`: after the last
    norm, the LM head's input. `keys_values`: of every layer, `[batch, num_kv_heads, length, head_dim]` each, with
    normed and rotated keys as in the target's cache; None for a layer with a state. Last layers that read the KV of
    earlier ones are left out.
    """

    layer_inputs: tuple[Tensor, ...]
    final_hidden: Tensor
    logits: Tensor
    keys_values: tuple[tuple[Tensor, Tensor] | None, ...]

    def taps(self) -> Tensor:
        """Return `[batch, length, 3 * hidden]`: the inputs of the tapped layers, concatenated."""
        taps = default_tap_layer_inputs(len(self.layer_inputs))
        return torch.cat([self.layer_inputs[layer] for layer in taps], dim=-1)


@torch.no_grad()
def run_target(model: Any, tokens: Tensor) -> TargetOutputs:
    """Run one causal forward over rows `[batch, length]`, each with positions from 0."""
    from transformers import DynamicCache

    masks = causal_masks(model.config, tokens)
    # A cache that knows of windows would keep the last keys only.
    whole = DynamicCache() if getattr(model.config, "sliding_window", None) else None
    output = model(
        input_ids=tokens, attention_mask=masks, past_key_values=whole, use_cache=True, output_hidden_states=True
    )
    # hidden_states[i] is the input of layer i; entry 0 is the embedding, the last one the final norm's output.
    *layer_inputs, final_hidden = output.hidden_states
    layers = output.past_key_values.layers
    keys_values = tuple((layer.keys, layer.values) if hasattr(layer, "keys") else None for layer in layers)
    return TargetOutputs(tuple(layer_inputs), final_hidden, output.logits, keys_values)
