"""The lab for other programs and notebooks: `spec_lab.run`. Only one run at a time is possible."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

from spec_lab.app.compose import Composed
from spec_lab.app.names import folder_name, free
from spec_lab.app.run import run as run_in
from spec_lab.record.models import Request, Run
from spec_lab.record.reading import read_requests
from spec_lab.study.run_table import format_run


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a finished run. `print` shows its tables and its verdict, and so does a notebook.

    Attributes:
        run: as in `summary.json`; `python -m spec_lab.report` prints the definition of every number.
        folder: the folder with all of its files.
    """

    run: Run
    folder: Path

    @property
    def requests(self) -> list[Request]:
        """Return the requests; `spec_lab.study.frame.requests_frame` makes a frame of them."""
        return read_requests(self.folder)

    def __str__(self) -> str:
        return format_run(self.run)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}\n{escape(str(self.folder))}</pre>"


def run(composed: Composed) -> Result:
    """Run in a new folder below its `output_dir`."""
    config = composed.config
    folder = free(Path(config.output_dir).absolute() / folder_name(config, composed.typed))
    return Result(run_in(composed, folder), folder)
