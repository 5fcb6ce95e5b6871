"""`target=pocket_hybrid|pocket_gemma|pocket_moe`: targets of other families than Qwen3, in modules of this project."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_lab.corpus.example import END_OF_TEXT, END_OF_TURN
from spec_lab.train.data import TrainingTokens
from spec_lab.train.decoder import DecoderLoss, TrainableDecoder, products_in_tf32
from spec_lab.train.decoder_checkpoint import as_saved, from_saved, in_saved_dtype
from spec_lab.train.decoder_families import gemma_keys, hybrid_keys, moe_keys
from spec_lab.train.gemma4 import TrainableGemma4
from spec_lab.train.generate import Continuation, generate_without_cache
from spec_lab.train.loop import CurvePoint, train
from spec_lab.train.target import TargetDescription
from spec_lab.train.target_config import DecoderTrainingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """What one family has of its own.

    Attributes:
        keys: its config.json, of the knobs and the size of the vocabulary.
        zero_centred: its norms are stored as what they multiply by, less 1.
        architecture: whose it is, for the card.
        layers: what its layers are, of its config.json, for the card.
    """

    keys: Callable[[Any, int], dict[str, Any]]
    architecture: str
    layers: Callable[[dict[str, Any]], str]
    decoder: Callable[[dict[str, Any]], TrainableDecoder] = TrainableDecoder
    zero_centred: bool = False


def hybrid_layers(config: dict[str, Any]) -> str:
    """Describe the layers of a Qwen3.5 for its card."""
    num_full = config["layer_types"].count("full_attention")
    return f"""of which {num_full} have gated attention ({config["num_attention_heads"]} query and
{config["num_key_value_heads"]} key-value heads of {config["head_dim"]}) and the others a gated delta net in its place
({config["linear_num_key_heads"]} key heads of {config["linear_key_head_dim"]}, {config["linear_num_value_heads"]} value
heads of {config["linear_value_head_dim"]}), which keeps a state; feed-forward {config["intermediate_size"]}"""


def gemma_layers(config: dict[str, Any]) -> str:
    """Describe the layers of a Gemma 4 for its card."""
    num_full = config["layer_types"].count("full_attention")
    return f"""of which {num_full} see all (heads of {config["global_head_dim"]}) and the others a window of
{config["sliding_window"]} keys (heads of {config["head_dim"]}), with {config["num_attention_heads"]} query and
{config["num_key_value_heads"]} key-value heads; the last {config["num_kv_shared_layers"]} layers read the keys and
values of earlier ones; feed-forward {config["intermediate_size"]}, an embedding of
{config["hidden_size_per_layer_input"]} for each layer, capped logits"""


def moe_layers(config: dict[str, Any]) -> str:
    """Describe the layers of a DeepSeek-V3 for its card."""
    return f"""latent attention ({config["num_attention_heads"]} heads over rows of {config["kv_lora_rank"]} +
{config["qk_rope_head_dim"]} numbers), the first layer dense (feed-forward {config["intermediate_size"]}) and the others
with {config["n_routed_experts"]} experts of width {config["moe_intermediate_size"]}, of which a token takes
{config["num_experts_per_tok"]}, beside one that all take; the experts' load was kept even by the bias of their choice
alone"""


FAMILIES = {
    "pocket_hybrid": DecoderFamily(hybrid_keys, "Qwen3.5", hybrid_layers, zero_centred=True),
    "pocket_gemma": DecoderFamily(gemma_keys, "Gemma 4", gemma_layers, decoder=TrainableGemma4),
    "pocket_moe": DecoderFamily(moe_keys, "DeepSeek-V3", moe_layers),
}
"""The families, by the option of `target`."""


@dataclass(frozen=True, slots=True)
class DecoderRecipe:
    """Trains a target of one of the `FAMILIES` on generated examples and natural text."""

    config: DecoderTrainingConfig

    @property
    def family(self) -> DecoderFamily:
        return FAMILIES[self.config.option]

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
        decoder = self.family.decoder(self.family.keys(self.config, len(tokenizer)) | ends)

        def batch_of(step: int) -> tuple[Tensor, Tensor]:
            return tokens.labelled_batch(step, self.config.optimisation.batch_size, seed)

        with products_in_tf32():
            loss = DecoderLoss(decoder)
            curve = train(loss, batch_of, self.config.optimisation, checkpoint, device, compiled=DecoderLoss.compiled)
        self._save(decoder, [ends["eos_token_id"], end_of_text_id], folder)
        return curve

    def load(self, folder: Path, device: torch.device) -> tuple[TrainableDecoder, PreTrainedTokenizerFast]:
        """Load the saved target, its weights held in float32, and its tokenizer; frozen."""
        from transformers import AutoTokenizer

        decoder = self.family.decoder(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        saved = load_file(folder / "model.safetensors")
        decoder.load_state_dict(from_saved(saved, self.family.zero_centred))
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return decoder.to(device).eval().requires_grad_(False), tokenizer

    def write(
        self, model: TrainableDecoder, prompts: list[list[int]], max_new_tokens: int, batch_size: int
    ) -> list[Continuation]:
        """Write the target's own greedy texts."""
        stop_ids = [model.config.keys["eos_token_id"], model.config.keys["pad_token_id"]]
        return generate_without_cache(model, prompts, max_new_tokens, batch_size, stop_ids)

    def describe(self, folder: Path) -> TargetDescription:
        """Say for the card what `NewTarget` asks."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return TargetDescription(self.family.architecture, self.family.layers(config))

    def _save(self, decoder: TrainableDecoder, stop_ids: list[int], folder: Path) -> None:
        """Save weights in bf16 and generation settings, as `AutoModelForCausalLM` loads them."""
        tensors = in_saved_dtype(as_saved(decoder.state_dict(), self.family.zero_centred))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        generation = {"eos_token_id": stop_ids, "pad_token_id": decoder.config.keys["pad_token_id"], "do_sample": False}
        for name, content in (("config.json", decoder.config.keys), ("generation_config.json", generation)):
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
