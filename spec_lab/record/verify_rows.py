"""The verify rows of a workload's first requests: the target's top probabilities at each position, and the draft there.

They are stored in `verify_rows.safetensors` next to `requests.jsonl`, so that `spec_lab.report --rescore` can apply
deterministic rules to the same trajectory. Such a rule needs only the top probabilities of a row, as long as its top-k
is not larger than the recorded one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_lab.core.errors import UserError
from spec_lab.record.models import Model
from spec_lab.record.recorder import replace_bytes

if TYPE_CHECKING:
    import numpy as np

VERIFY_ROWS_FILE = "verify_rows.safetensors"
MAX_BYTES = 256 * 2**20


class RowsOrigin(Model):
    """The facts about the run that a rule needs in addition to the rows.

    Attributes:
        request_ids: the requests, in the order of the rows.
        markers: ids of the begin and the end marker of thinking; None if the tokenizer has none.
        prefill_chunk: most rows of a prompt in a forward. With phase=round, the last chunk alone decides whether the
            first round may relax.
    """

    request_ids: list[str]
    markers: tuple[int, int] | None
    eos_token_ids: list[int]
    prefill_chunk: int


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """The rounds of the recorded requests, request by request; `rounds` is their total number, and N is K + 1.

    Attributes:
        first_ids: [requests] the token sampled by the prompt pass.
        num_rounds: [requests].
        draft_ids: [rounds, K].
        accepted: [rounds] number of drafts that the run's own rule accepted, before any cut.
        last_ids: [rounds] the token that the rule chose after them.
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
    """Return the bytes of one request round in the file: 4 for each number."""
    return 4 * (num_draft_tokens + 2 + 2 * (num_draft_tokens + 1) * topk)


def save_verify_rows(folder: Path, rows: VerifyRows) -> None:
    """Write the rows into the run's folder, whole or not at all."""
    from safetensors.numpy import save

    arrays = {each.name: getattr(rows, each.name) for each in fields(rows) if each.name != "origin"}
    replace_bytes(folder / VERIFY_ROWS_FILE, save(arrays, metadata={"origin": rows.origin.model_dump_json()}))


def load_verify_rows(folder: Path) -> VerifyRows:
    """Return the rows of the run in `folder`.

    Raises:
        UserError: the run recorded none.
    """
    from safetensors import safe_open

    path = folder / VERIFY_ROWS_FILE
    if not path.is_file():
        raise UserError(f"{path} is missing; run with record.topk=16 to keep the verify rows")
    with safe_open(path, framework="numpy") as file:
        origin, names = RowsOrigin.model_validate_json(file.metadata()["origin"]), file.keys()
        return VerifyRows(origin, **{name: file.get_tensor(name) for name in names})
