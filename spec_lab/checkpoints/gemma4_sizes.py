"""The facts of a Gemma 4 decoder beside the plans of its layers, without torch."""

from __future__ import annotations

from dataclasses import dataclass


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
