"""`python -m spec_lab.lm_eval --model_args target=...,drafter=eagle3,acceptance=fly --tasks TASK`: measures
quality with EleutherAI's lm-evaluation-harness.

The harness runs the tasks and prints the scores; the lab's engine is its model. All arguments are those of the harness
(`lm-eval run --help`). `--model_args` takes overrides of python -m spec_lab, separated by commas. Inside a list, write
; instead of a comma. `--batch_size` is the run's batch_size. Only tasks that generate text can be run. Acceptance
length and speed are printed after all requests are answered.

  python -m spec_lab.lm_eval --model_args target=pocket,drafter=eagle3,acceptance=relaxed_thinking --tasks sums \\
      --include_path my_tasks --apply_chat_template --batch_size 4
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from spec_lab.core.ending import ended, leave

MODEL = "spec_lab"


def main(arguments: Sequence[str] | None = None) -> int:
    """Hand `arguments` (default: those of the process) on to the harness and return the exit code."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    return ended(lambda: _run(typed))


def _run(typed: list[str]) -> int:
    if not typed or "--help" in typed or "-h" in typed:
        print(__doc__)
        return 0
    import lm_eval._cli as harness

    import spec_lab.lm_eval.model  # noqa: F401  registers the model

    argv = sys.argv
    device = [] if "--device" in typed else ["--device", "auto"]  # the harness takes cuda:0, even without a GPU
    sys.argv = ["lm-eval", "run", *typed, *device, "--model", MODEL]
    try:
        cli = harness.HarnessCLI()
        cli.execute(cli.parse_args())
    except SystemExit as error:  # argparse has said why
        return error.code if isinstance(error.code, int) else 2
    finally:
        sys.argv = argv
    return 0


if __name__ == "__main__":
    leave(main)
