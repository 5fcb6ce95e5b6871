"""The verify rows of one pass over a workload: what the target thought at each position, and what was drafted there.

Kept in `verify_rows.safetensors` beside `requests.jsonl`, so that deterministic rules can be re-scored on one
trajectory (`spec_lab.rescore`). The top probabilities of a row answer all that such a rule asks, as long as its own
top-k is no larger than the recorded one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_lab.errors import UserError

if TYPE_CHECKING:
    import numpy as np

VERIFY_ROWS_FILE = "verify_rows.safetensors"
MAX_BYTES = 256 * 2**20
ARRAYS = ("first_ids", "num_rounds", "draft_ids", "accepted", "last_ids", "top_ids", "top_probabilities")


@dataclass(frozen=True, slots=True)
class RowsOrigin:
    """What a rule has to know of the run besides the rows.

    Attributes:
        request_ids: in the order of the rows.
        markers: ids of the begin and the end marker of thinking; None where the tokenizer has none.
        prefill_chunk: prompt rows a forward, which TensorRT-LLM's phase depends on.
    """

    request_ids: list[str]
    markers: tuple[int, int] | None
    eos_token_ids: list[int]
    prefill_chunk: int


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """Rounds of all requests one behind the other, each request's in order; `rounds` is their number.

    Attributes:
        first_ids: [requests] the prompt pass's token.
        num_rounds: [requests].
        draft_ids: [rounds, K].
        accepted: [rounds] drafts the run's own rule accepted, before any cut.
        last_ids: [rounds] the token emitted after them.
        top_ids: [rounds, N, topk] the likeliest tokens of each row, likeliest first, the lowest id first among equals.
        top_probabilities: [rounds, N, topk] float32, of the softmax of the raw logits.
    """

    origin: RowsOrigin
    first_ids: np.ndarray[Any, Any]
    num_rounds: np.ndarray[Any, Any]
    draft_ids: np.ndarray[Any, Any]
    accepted: np.ndarray[Any, Any]
    last_ids: np.ndarray[Any, Any]
    top_ids: np.ndarray[Any, Any]
    top_probabilities: np.ndarray[Any, Any]


def num_bytes_per_round(num_draft_tokens: int, topk: int) -> int:
    """What one request round takes in the file: 4 bytes an id and a probability."""
    return 4 * (num_draft_tokens + 2 + 2 * (num_draft_tokens + 1) * topk)


def save_verify_rows(folder: Path, rows: VerifyRows) -> None:
    from safetensors.numpy import save_file

    arrays = {name: getattr(rows, name) for name in ARRAYS}
    save_file(arrays, folder / VERIFY_ROWS_FILE, metadata={"origin": json.dumps(asdict(rows.origin))})


def load_verify_rows(folder: Path) -> VerifyRows:
    """The rows of the run in `folder`.

    Raises:
        UserError: the run recorded none.
    """
    from safetensors import safe_open

    path = folder / VERIFY_ROWS_FILE
    if not path.is_file():
        raise UserError(f"{path} is missing; run with record.topk=16 to keep the verify rows")
    with safe_open(path, framework="numpy") as file:
        origin = json.loads(file.metadata()["origin"])
        arrays = {name: file.get_tensor(name) for name in ARRAYS}
    markers = origin.pop("markers")
    return VerifyRows(RowsOrigin(**origin, markers=None if markers is None else tuple(markers)), **arrays)
