"""`python -m spec_lab.rescore FOLDER RULE...`: what other rules would have accepted in a recorded run.

The run must have kept its verify rows (record.topk=16). Rules that draw at random, or that need parts of a running
engine, cannot be used. No model is run.

  python -m spec_lab.rescore outputs/RUN acceptance=strict
  python -m spec_lab.rescore outputs/RUN acceptance=relaxed_thinking acceptance.topk=3,10 acceptance.delta=0.2,0.4
  python -m spec_lab.rescore outputs/RUN acceptance=strict acceptance=relaxed_thinking acceptance.form=ratio

Each acceptance= begins a rule, and the knobs after it belong to it. Values separated by commas make several rules.
extensions=[MODULE] names the module of rules from an extension. FOLDER may be anywhere among the arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from spec_lab.core.ending import ended, leave
from spec_lab.core.errors import UserError
from spec_lab.menu.config import DrafterConfig
from spec_lab.record.reading import read_request_rows, read_summary
from spec_lab.record.verify_rows import VerifyRows, load_verify_rows
from spec_lab.rescore.rules import is_of_a_rule, read_rules
from spec_lab.rescore.table import Judgement, format_judgements


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and return the exit code: 2 if a rule or the run is refused."""
    return ended(lambda: _rescore(_parse(arguments)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m spec_lab.rescore", description=__doc__, formatter_class=layout)
    parser.add_argument("folder", metavar="FOLDER", help="the folder of a run")
    parser.add_argument("rules", nargs="+", metavar="RULE", help="acceptance=RULE, then its acceptance.KNOB=VALUE")
    options = parser.parse_args(arguments)
    options.folder, options.rules = _find_folder([options.folder, *options.rules])
    return options


def _find_folder(arguments: list[str]) -> tuple[Path, list[str]]:
    """Return the folder, wherever it is among the arguments, and the arguments for rules in their order."""
    others = [argument for argument in arguments if not is_of_a_rule(argument)]
    if not others:
        raise UserError(f"{' '.join(arguments)}: no run is named; add the folder of a run, such as outputs/RUN")
    folder = next((other for other in others if Path(other).exists()), others[0])
    arguments.remove(folder)
    return Path(folder), arguments


def _rescore(options: argparse.Namespace) -> int:
    """Judge the run's rows by the rules, and print the table. Torch is imported only after rows and rules were read."""
    folder: Path = options.folder
    summary, rows = read_summary(folder), load_verify_rows(folder)
    rules = read_rules(options.rules, num_draft_tokens=rows.draft_ids.shape[-1] or DrafterConfig.num_draft_tokens)
    categories = {row["id"]: row["category"] for row in read_request_rows(folder)}

    from spec_lab.rescore.judge import read_prompts, rescore_rows

    prompts = read_prompts(folder, rows)
    judged = [
        Judgement(rule.name, rescore_rows(rows, prompts, rule.config.acceptance, rule.config.extensions))
        for rule in rules
    ]
    own = Judgement(f"{summary['choices'].get('acceptance', 'unknown')} (the run's own)", _recorded(rows))
    print(format_judgements(own, judged, categories))
    return 0


def _recorded(rows: VerifyRows) -> dict[str, list[int]]:
    """Return the numbers of drafts that the run's own rule accepted, as `rescore_rows` returns them for other rules."""
    accepted = iter(rows.accepted.tolist())
    counts = zip(rows.origin.request_ids, rows.num_rounds.tolist(), strict=True)
    return {request_id: [next(accepted) for _ in range(count)] for request_id, count in counts}


if __name__ == "__main__":
    leave(main)
