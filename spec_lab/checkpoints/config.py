"""Sizes and options of a decoder as the forward code needs them, and what else stands in a config.json.

The readers in `families` make a `ModelConfig` of a file, one reader a family, without transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.gguf_file import SUFFIX
from spec_lab.checkpoints.json_input import ConfigFields, read_json
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.errors import UserError

MTP_COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# Its files say nothing of the module they hold, which vLLM takes for one too.
ONE_UNNAMED_MODULE = ("Qwen3NextForCausalLM",)
# Past any model there is: a slip of the pen must not make us list the names of millions of tensors.
MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class Gemma4Sizes:
    """What a whole Gemma 4 decoder has that other families do not.

    Attributes:
        embedding_scale: sqrt(hidden_size), by which embeddings are multiplied.
        logit_softcap: logits are kept within plus and minus this; None where they are not.
        per_layer_width: channels of the embedding that each layer has of its own; 0 where there is none.
        keys_are_values: layers of full attention have no v_proj: their values are the keys' projections.
    """

    embedding_scale: float
    logit_softcap: float | None
    per_layer_width: int
    keys_are_values: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The facts of a whole decoder, and the plan of each of its layers.

    Attributes:
        family: whose tensors and forward it has.
        layers: one plan a layer.
        eos_token_ids: every id that ends a request, empty when the checkpoint names none.
        gemma4: what Gemma 4 has besides; None in other families.
        max_dense_positions: up to which every key is attended; past them the model chooses keys (DeepSeek-V3.2's sparse
            attention), which this code does not. None is no limit.
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

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def keeps_states(self) -> bool:
        """Tells whether a layer has a state, out of which rejected drafts have to be taken again."""
        return any(plan.delta_net is not None for plan in self.layers)

    @property
    def only_layer(self) -> LayerPlan:
        """The plan of a decoder of one layer, as draft heads are."""
        (plan,) = self.layers
        return plan


def read_config_json(folder: Path, knob: str) -> dict[str, Any]:
    """Read the config.json of a checkpoint folder, as it stands in the file."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; {knob} must name one with config.json and model.safetensors")
    path = folder / "config.json"
    if not path.is_file():
        files = sorted(folder.glob(f"*{SUFFIX}")) if knob == "target.path" else []
        named = f"{knob} must name a Hugging Face checkpoint folder"
        remedy = f"name the GGUF file in it, {knob}={files[0]}" if files else named
        raise UserError(f"{folder}: has no config.json; {remedy}")
    return read_json(path)


def text_part(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return the decoder's keys: those of `text_config`, where a config.json has such a part, else its own."""
    return ConfigFields(config, source).object("text_config") or config


def num_mtp_modules(config: Mapping[str, Any], source: str = "config.json") -> int:
    """Count the multi-token prediction modules that a config.json names; where it names none, those of its family."""
    fields = ConfigFields(text_part(config, source), source)
    unnamed = int(any(name in ONE_UNNAMED_MODULE for name in fields.texts("architectures")))
    named = (fields.integer(key, least=0, most=MAX_LAYERS) for key in MTP_COUNT_KEYS if fields.has(key))
    return next(named, unnamed)


def read_num_mtp_modules(folder: Path, knob: str) -> int:
    """Read `num_mtp_modules` of a checkpoint folder."""
    return num_mtp_modules(read_config_json(folder, knob), str(folder / "config.json"))
