"""The table of drafters: parameters, bytes and training cost, from their weight files and model cards."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from spec_lab.app.compose import compose
from spec_lab.checkpoints.checkpoint import without_mtp
from spec_lab.checkpoints.checkpoint_files import StoredTensor, checkpoint_files, tensors_of
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError
from spec_lab.paper.provenance import NONE
from spec_lab.paper.runs import PaperRun
from spec_lab.paper.table import PaperTable, TableColumn, TableRow, Value, table_of

CARD = "README.md"
NOT_SAID = "its card does not say"
BYTES: Mapping[str, int] = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}
"""Bytes of a number by its type code in a safetensors file; other types are counted as one byte."""
WHAT = re.compile(r"On ([\d,]+) texts")
STEPS = re.compile(r"([\d,]+) steps of ([\d,]+) rows")
HOURS = re.compile(r"([\d,.]+) s on ([^.]+?) with torch")


def drafter_table(runs: Sequence[PaperRun]) -> PaperTable:
    """Return a row for each line of the acceptance tables."""
    lines: dict[str, PaperRun] = {}
    for run in runs:
        if run.cell.part == "acceptance":
            lines.setdefault(run.cell.line, run)
    columns = [
        TableColumn("line", "line"),
        TableColumn("parameters", "parameters", 0),
        TableColumn("bytes", "bytes", 0),
        TableColumn("vocabulary", "draft vocabulary", 0),
        TableColumn("texts", "training texts"),
        TableColumn("steps", "steps"),
        TableColumn("cost", "training time"),
    ]
    rows = [TableRow({"line": line, **_values(run)}, run.provenance) for line, run in lines.items()]
    note = (
        "Parameters and bytes are those of the drafter's own tensors, without those shared with the target. Training "
        f"is as stated in its card ({CARD} in the folder of the weights)."
    )
    return table_of("drafters", "Drafters", columns, ("line",), rows, note)


def _values(run: PaperRun) -> dict[str, Value]:
    composed = compose(run.cell.overrides).config
    folder = _drafter_folder(composed)
    if folder is None:
        return {"parameters": 0, "bytes": 0, "vocabulary": None, **dict.fromkeys(("texts", "steps", "cost"), NONE)}
    tensors = own_tensors(folder, composed.target.folder)
    floats = [tensor for tensor in tensors if tensor.dtype not in ("I64", "BOOL")]
    return {
        "parameters": sum(math.prod(tensor.shape) for tensor in floats),
        "bytes": sum(math.prod(tensor.shape) * BYTES.get(tensor.dtype, 1) for tensor in tensors),
        "vocabulary": next((tensor.shape[0] for tensor in tensors if tensor.name == "d2t"), None),
        **read_card(folder / CARD),
    }


def _drafter_folder(run: Run) -> Path | None:
    folder = getattr(run.drafter, "folder", None)
    return None if folder is None else folder(run)


def own_tensors(folder: Path, target: Path) -> list[StoredTensor]:
    """Return the tensors in the drafter's folder; if that is the target's, those of the MTP modules alone."""
    files = checkpoint_files(folder)
    stored = {name: tensor for file in files for name, tensor in tensors_of(file).items()}
    trunk = without_mtp(stored) if folder == target else {}
    return [tensor for name, tensor in stored.items() if name not in trunk]


def read_card(path: Path) -> dict[str, Value]:
    """Return a model card's entries about training, in the card's words; `NOT_SAID` for those that it does not have."""
    try:
        text = " ".join(path.read_text(encoding="utf-8").split()) if path.is_file() else ""
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); correct it or move it away") from error
    training = text.partition("## Training")[2].partition(" ## ")[0]
    texts, steps, hours = WHAT.search(training), STEPS.search(training), HOURS.search(training)
    return {
        "texts": NOT_SAID if texts is None else texts[1],
        "steps": NOT_SAID if steps is None else f"{steps[1]} of {steps[2]} rows",
        "cost": NOT_SAID if hours is None else f"{hours[1]} s on {hours[2]}",
    }
