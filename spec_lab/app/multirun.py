"""What Hydra calls when a multirun begins and ends: `hydra.callbacks` of conf/config.yaml."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from spec_lab.app.run import display
from spec_lab.record.names import SUMMARY_FILE


class Multirun(Callback):
    """Prints a line for each run when all jobs are through, and ends the command with the code of the worst of them.

    Jobs may have run in other processes, so their records are read.
    """

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self._began = time.time()

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        from spec_lab.record.reading import find_runs
        from spec_lab.study.report import sweep_text

        folder = Path(config.hydra.sweep.dir)
        runs = find_runs(folder)
        print(f"{sweep_text(runs)}\n\nmore: python -m spec_lab.report {display(folder)}\n{display(folder)}")
        changed = (found for found in runs if (found.folder / SUMMARY_FILE).stat().st_mtime >= self._began)
        ended = {found.run.status for found in changed}
        if ended - {"finished"}:
            sys.exit(2 if ended <= {"finished", "refused"} else 1)
