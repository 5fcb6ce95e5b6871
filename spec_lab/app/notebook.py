"""The lab for other programs and notebooks: `spec_lab.run`. Only one run at a time is possible."""

from __future__ import annotations

from html import escape
from pathlib import Path

from spec_lab.app.compose import Composed
from spec_lab.app.names import folder_name, free
from spec_lab.app.run import run as run_in
from spec_lab.record.reading import Found
from spec_lab.study.run_table import format_run


class Result(Found):
    """A finished run and its folder. `print` shows its tables and its verdict, and so does a notebook.

    `run` is as in `summary.json`; `python -m spec_lab.report` prints the definition of every number. Of `requests`,
    `spec_lab.study.frame.requests_frame` makes a frame.
    """

    def __str__(self) -> str:
        return format_run(self.run)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}\n{escape(str(self.folder))}</pre>"


def run(composed: Composed) -> Result:
    """Run in a new folder below its `output_dir`."""
    config = composed.config
    folder = free(Path(config.output_dir).absolute() / folder_name(config, composed.typed))
    return Result(folder, run_in(composed, folder))
