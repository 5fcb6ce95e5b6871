"""Makes the finished record of a run from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spec_lab.record.definitions import definitions
from spec_lab.record.metric import Measured, Metric, part_of
from spec_lab.record.models import Kernel, Run
from spec_lab.record.verdict import verdict


def finished_run(
    begun: Run, main: Measured, metrics: Sequence[Metric] = (), kernels: Sequence[Any] = (), **found: Any
) -> Run:
    """Return the record of a run that finished.

    Args:
        begun: what was known before it decoded.
        metrics: those of extensions.
        kernels: the kernels of the profiled rounds.
        found: further fields of the record.
    """
    # A reference is compared with those before it in the order of references, as the run is with all of them.
    names = list(main.references)
    parts = {
        name: part_of(replace(each, references={n: main.references[n] for n in names if n != name}), metrics)
        for name, each in main.references.items()
    }
    own = part_of(main, metrics)
    run = begun.model_copy(
        update={
            **{name: getattr(own, name) for name in type(own).model_fields},
            "status": "finished",
            "reason": None,
            "references": parts,
            "kernels": [Kernel.model_validate(kernel) for kernel in kernels],
            "definitions": definitions(metrics),
            **found,
        }
    )
    return run.model_copy(update={"verdict": verdict(run)})
