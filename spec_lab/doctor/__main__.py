"""python -m spec_lab.doctor: why is acceptance low? Takes the overrides of one run, looks at its drafter, target and
loop, and names the most likely fault. Nothing is written. Exit code 0: none found, 1: one found, or a failure of the
program, 2: refused. What each check does: docs/doctor.md.

  python -m spec_lab.doctor drafter=eagle3
  python -m spec_lab.doctor target=hf target.path=DIR drafter=eagle3 drafter.path=DIR graph=full_loop

It takes the overrides of python -m spec_lab, which python -m spec_lab --help lists, and no flags.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from spec_lab.app.compose import compose
from spec_lab.config.checks import admit
from spec_lab.core.ending import ended, leave


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine the run given by `arguments` (default: those of the process), and return the exit code."""
    return ended(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    """Examine the run. Torch is imported only behind the checks, so that typos are refused at once."""
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return 0
    run = admit(compose(arguments).config)
    from spec_lab.build.auto import with_auto_chosen
    from spec_lab.doctor.examine import examine
    from spec_lab.doctor.findings import faults, format_findings
    from spec_lab.doctor.subject import load_subject
    from spec_lab.measure.lab import use_threads

    if not run.acceptance.keeps_greedy_text or run.sampling.temperature > 0:
        print("examined with strict greedy acceptance, where a draft is right or wrong", file=sys.stderr)
    use_threads(with_auto_chosen(run))
    print("examining ...", file=sys.stderr, flush=True)
    findings = examine(load_subject(run))
    print(format_findings(findings))
    return 1 if faults(findings) else 0


if __name__ == "__main__":
    leave(main)
