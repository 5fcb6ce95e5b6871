"""Measures the drafters of target=pocket again and writes the evaluation of their cards, as the training app does.

    python scripts/measure_zoo.py                    # all of them; on a CPU
    python scripts/measure_zoo.py eagle3 mtp_eagle   # some of them

A card holds what was measured when its model had been trained; this is for when a definition has changed since. The
target's card counts the drafts of eagle3, and is written with it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from spec_lab.train.card import evaluation_section
from spec_lab.train.checks import SHIPPED_TARGET
from spec_lab.train.config import EvaluationConfig
from spec_lab.train.evaluate import EvaluationRecipe, format_table
from spec_lab.train.options import DRAFTERS, QWEN3_DRAFTERS
from spec_lab.train.target import load_target, without_progress_bars

CARD = "README.md"


def main(names: Iterable[str]) -> None:
    """Measure the drafters of `names`; all that are shipped where there are none."""
    options = [option for option in DRAFTERS if option.name in QWEN3_DRAFTERS]
    recipes = {option.name: option.recipe(option.schema()) for option in options if option.recipe is not None}
    device = torch.device("cpu")
    with without_progress_bars():
        model, tokenizer = load_target(SHIPPED_TARGET, device)
        evaluation = EvaluationRecipe(EvaluationConfig(batch_size=64))
        continuations = evaluation.continuations(model, tokenizer)
        for name in names or recipes:
            folder = SHIPPED_TARGET.with_name(f"pocket-{name}")
            match = recipes[name].matcher(folder, model, device)
            report, _ = evaluation.measure(model, tokenizer, match, continuations)
            print(f"{name}\n{format_table(report)}", flush=True)
            section = evaluation_section(report, recipes[name].describe(folder).kind)
            for card in [folder / CARD] + [SHIPPED_TARGET / CARD] * (name == "eagle3"):
                replace_evaluation(card, section)


def replace_evaluation(card: Path, section: str) -> None:
    """Put `section` in the place of the card's own."""
    text, count = re.subn(
        r"^## Evaluation\n.*?(?=^## |\Z)", lambda _: f"{section}\n\n", card.read_text("utf-8"), flags=re.M | re.S
    )
    assert count == 1, f"{card} has {count} evaluations"
    card.write_text(text, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
