"""The verify rows of a workload's first requests: the target's top probabilities at each position, and the draft there.

They are stored in `verify_rows.safetensors` next to `requests.jsonl`, so that deterministic rules can be re-scored on
the same trajectory (`spec_lab.rescore`). Such a rule needs only the top probabilities of a row, as long as its top-k is
not larger than the recorded one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from spec_lab.core.errors import UserError
from spec_lab.record.layout import misfit, parse_json
from spec_lab.record.sinks import VERIFY_ROWS_FILE, replace_bytes

if TYPE_CHECKING:
    import numpy as np

MAX_BYTES = 256 * 2**20
ARRAYS = ("first_ids", "num_rounds", "draft_ids", "accepted", "last_ids", "top_ids", "top_probabilities")


@dataclass(frozen=True, slots=True)
class RowsOrigin:
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

    arrays = {name: getattr(rows, name) for name in ARRAYS}
    content = save(arrays, metadata={"origin": json.dumps(asdict(rows.origin))})
    replace_bytes(folder / VERIFY_ROWS_FILE, content)


def load_verify_rows(folder: Path) -> VerifyRows:
    """Return the rows of the run in `folder`.

    Raises:
        UserError: the run recorded none, or the file is broken.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / VERIFY_ROWS_FILE
    if not path.is_file():
        raise UserError(f"{path} is missing; run with record.topk=16 to keep the verify rows")
    try:
        with safe_open(path, framework="numpy") as file:
            origin = _read_origin(file.metadata())
            problem = _shape_problem(file, origin)
            if problem is not None:
                raise ValueError(problem)
            rows = VerifyRows(origin, **{name: file.get_tensor(name) for name in ARRAYS})
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path}: not the verify rows of a run ({error}); run again with record.topk=16") from error
    problem = _value_problem(rows)
    if problem is not None:
        raise UserError(f"{path}: {problem}; run again with record.topk=16")
    return rows


class _StoredOrigin(TypedDict):
    request_ids: list[str]
    markers: list[int] | None
    eos_token_ids: list[int]
    prefill_chunk: int


def _read_origin(metadata: Mapping[str, str] | None) -> RowsOrigin:
    """Read the origin of the rows from the file's metadata.

    Raises:
        ValueError: the metadata have no valid origin.
    """
    if metadata is None or "origin" not in metadata:
        raise ValueError("it does not name the requests of the rows")
    origin = parse_json(metadata["origin"])
    problem = misfit(origin, _StoredOrigin, "origin")
    if problem is not None:
        raise ValueError(problem)
    markers, chunk, ids = origin["markers"], origin["prefill_chunk"], origin["request_ids"]
    if (markers is not None and len(markers) != 2) or chunk < 1 or len(set(ids)) < len(ids):
        raise ValueError("origin needs two markers or none, a prefill_chunk above 0, and every request once")
    return RowsOrigin(ids, None if markers is None else (markers[0], markers[1]), origin["eos_token_ids"], chunk)


def _shape_problem(file: Any, origin: RowsOrigin) -> str | None:
    """Say what is wrong with the arrays before any is read; `file` is an open safetensors file."""
    missing = [name for name in ARRAYS if name not in file.keys()]  # noqa: SIM118
    if missing:
        return f"it has no {missing[0]}"
    stored = {name: file.get_slice(name) for name in ARRAYS}
    shapes = {name: tuple(part.get_shape()) for name, part in stored.items()}
    if len(shapes["top_ids"]) != 3 or shapes["top_ids"][1] < 1 or shapes["top_ids"][2] < 1:
        return f"top_ids is {list(shapes['top_ids'])}, not [rounds, rows, topk]"
    num_rounds, num_rows, _ = shapes["top_ids"]
    requests, rounds = (len(origin.request_ids),), (num_rounds,)
    expected: dict[str, tuple[int, ...]] = {
        "first_ids": requests,
        "num_rounds": requests,
        "draft_ids": (num_rounds, num_rows - 1),
        "accepted": rounds,
        "last_ids": rounds,
        "top_ids": shapes["top_ids"],
        "top_probabilities": shapes["top_ids"],
    }
    for name, shape in expected.items():
        dtype = "F32" if name == "top_probabilities" else "I32"
        if shapes[name] != shape or stored[name].get_dtype() != dtype:
            return f"{name} is {stored[name].get_dtype()} {list(shapes[name])}, not {dtype} {list(shape)}"
    return None


def _value_problem(rows: VerifyRows) -> str | None:
    num_drafts = rows.draft_ids.shape[1]
    if (rows.num_rounds < 0).any() or rows.num_rounds.sum(dtype="int64") != len(rows.accepted):
        return f"num_rounds does not add up to the {len(rows.accepted)} rounds there are"
    if (rows.accepted < 0).any() or (rows.accepted > num_drafts).any():
        return f"accepted has values outside 0 to {num_drafts}"
    return None
