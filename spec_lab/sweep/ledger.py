"""Records the parameters that a sweep proposes, each before its run begins, so that a killed sweep can continue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_lab.core.errors import UserError
from spec_lab.core.regular import regular_text
from spec_lab.record.recorder import write_json

LEDGER_FILE = "proposals.json"


class Ledger:
    """The parameters of the runs of one sweep, in order. The file is replaced as a whole, so it is never half-written.

    Args:
        sweep: the description of the sweep, written into the file for its readers.

    Raises:
        UserError: the existing file does not have the form that this class writes.
    """

    def __init__(self, folder: Path, sweep: Mapping[str, Any]) -> None:
        self._path = folder / LEDGER_FILE
        self._sweep = dict(sweep)
        self.proposals: list[dict[str, Any]] = _read(self._path)

    def append(self, parameters: dict[str, Any]) -> None:
        """Add the parameters of the next run, and write the file."""
        self.proposals.append(parameters)
        write_json(self._path, {"sweep": self._sweep, "proposals": self.proposals})


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        proposals = json.loads(regular_text(path))["proposals"]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{path}: not the proposals of a sweep ({error!r}); move its folder away") from error
    if not isinstance(proposals, list) or not all(isinstance(parameters, dict) for parameters in proposals):
        raise UserError(f"{path}: not the proposals of a sweep; move its folder away")
    return proposals
