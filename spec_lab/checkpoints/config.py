"""Sizes and options of a decoder as the forward code needs them, and other contents of config.json.

`families` makes a `ModelConfig` from a file, through the config classes of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.gguf_config import gguf_config
from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.json_input import present, read_json
from spec_lab.checkpoints.plan import LayerPlan

MTP_COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# The config.json of this family does not mention its MTP module; vLLM too assumes one.
ONE_UNNAMED_MODULE = "qwen3_next"


@dataclass(frozen=True, slots=True)
class Gemma4Sizes:
    """The parts of a whole Gemma 4 decoder that other families lack.

    Attributes:
        embedding_scale: sqrt(hidden_size), by which embeddings are multiplied.
        logit_softcap: the bound of logits' absolute values; None if they are not capped.
        per_layer_width: width of the additional embedding for each layer; 0 if there is none.
        keys_are_values: whether layers of full attention have no v_proj and use the keys' projections as values.
    """

    embedding_scale: float
    logit_softcap: float | None
    per_layer_width: int
    keys_are_values: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of a whole decoder, and the plan of each of its layers.

    Attributes:
        family: the family that determines tensor names and forward code.
        layers: one plan for each layer.
        eos_token_ids: every id that ends a request; empty if the checkpoint names none.
        gemma4: additional sizes of Gemma 4; None in other families.
        max_dense_positions: number of positions up to which attention is a Llama's. Beyond it the model would choose
            keys (DeepSeek-V3.2's sparse attention) or scale queries by their position (Ministral 3), which this code
            does not implement. None: no limit.
        factors: constants by which the weights of the named products are multiplied when they are read (Granite).
    """

    family: str
    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    layers: tuple[LayerPlan, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    gemma4: Gemma4Sizes | None = None
    max_dense_positions: int | None = None
    factors: tuple[tuple[str, float], ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def embedding_scale(self) -> float:
        """The factor of the embeddings."""
        return 1.0 if self.gemma4 is None else self.gemma4.embedding_scale

    @property
    def keeps_states(self) -> bool:
        """Return whether any layer has a state, which rejected drafts must be removed from."""
        return any(plan.delta_net is not None for plan in self.layers)

    @property
    def only_layer(self) -> LayerPlan:
        """Return the plan of the layer in a decoder with only one, such as a draft head."""
        (plan,) = self.layers
        return plan


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the decoder's keys: those in `text_config` if config.json has it, else those at the top level."""
    part: Mapping[str, Any] = config.get("text_config") or config
    return part


def num_mtp_modules(config: Mapping[str, Any]) -> int:
    """Return the number of multi-token prediction modules in a config.json; if it does not say, its family's number."""
    keys = present(text_part(config))
    unnamed = int(keys.get("model_type") == ONE_UNNAMED_MODULE)
    return next((int(keys[key]) for key in MTP_COUNT_KEYS if key in keys), unnamed)


def read_keys(path: Path) -> dict[str, Any]:
    """Read the config.json of a folder, or what it would say of the model in a GGUF file."""
    return gguf_config(path) if is_gguf(path) else read_json(path / "config.json")
