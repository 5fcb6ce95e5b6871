"""Finds drafter.confidence_temperatures of a run, by sequential temperature scaling (DSpark, arXiv 2607.05147).

    python benchmarks/confidence_temperatures.py drafter=eagle3 drafter.num_draft_tokens=5 workload.limit=24

The run decodes once, with every draft offered. Then it finds a temperature for each draft position, one after another.
The product of the scaled confidences up to a position estimates how often the draft there, and all before it, are
accepted. The temperature is the one with the smallest calibration error of this product. Do not use the prompts that
are measured later.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from spec_lab.core.errors import UserError
from spec_lab.measure.lab import MAIN, load_lab
from spec_lab.menu.chosen import choose
from spec_lab.paper.reliability import calibration_error
from spec_lab.program.compose import compose_run
from spec_lab.program.ending import guarded
from spec_lab.program.table import format_table

ALL_OFFERED = ("drafter.stop=confidence", "drafter.stop_threshold=1e-9", "references=[]", "graph=eager")
GRID = torch.logspace(-1, 1, 81, base=5.0).tolist()
NUM_BINS = 15


def main(arguments: Sequence[str] | None = None) -> int:
    """Decode, and print the value of the knob, with the calibration errors before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    said, accepted = decoded(parser.parse_args(arguments).overrides)
    found = temperatures(said, accepted)
    body = [
        [str(draft + 1), f"{(accepted > draft).double().mean():.3f}", *(f"{error:.3f}" for error in errors)]
        for draft, errors in enumerate(zip(errors_of(said, accepted), errors_of(said, accepted, found), strict=True))
    ]
    print(f"{len(accepted)} rounds\n")
    print(format_table(["draft", "accepted", "error as said", "error scaled"], body, left=()))
    print(f"\ndrafter.confidence_temperatures=[{','.join(f'{temperature:.3g}' for temperature in found)}]")
    return 0


def decoded(overrides: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for the rounds of all requests, the drafter's confidence in each draft [rounds, K], and the number of
    accepted drafts [rounds]."""
    drafter = compose_run(overrides)[0].drafter
    if not hasattr(drafter, "stop"):
        raise UserError(f"drafter={drafter.name} gives no confidences; choose one with weights, such as drafter=eagle3")
    config, _ = compose_run([*overrides, *ALL_OFFERED])
    lab = load_lab(choose(config))
    engine = lab.engines[MAIN]
    requests = engine.generate(lab.requests).requests
    products = torch.tensor([said for record in requests for said in record.confidence_per_round], dtype=torch.float64)
    accepted = torch.tensor([count for record in requests for count in record.accepted_per_round])
    before = torch.cat((torch.ones_like(products[:, :1]), products[:, :-1]), dim=1)
    return (products / before.clamp(min=1e-30)).clamp(0, 1), accepted


def temperatures(said: torch.Tensor, accepted: torch.Tensor) -> list[float]:
    """Find a temperature for each draft position. `said` [rounds, K] is the confidence in each draft, given that those
    before it are accepted."""
    product, found = torch.ones_like(said[:, 0]), []
    for draft, own in enumerate(said.unbind(1)):
        products = [product * torch.sigmoid(torch.logit(own) / temperature) for temperature in GRID]
        errors = [_error(scaled, accepted > draft) for scaled in products]
        best = min(range(len(GRID)), key=lambda index: errors[index])
        product = products[best]
        found.append(GRID[best])
    return found


def errors_of(said: torch.Tensor, accepted: torch.Tensor, found: Sequence[float] | None = None) -> list[float]:
    """Return the calibration error of the product up to each draft."""
    scaled = said if found is None else torch.sigmoid(torch.logit(said) / torch.tensor(found, dtype=said.dtype))
    return [_error(product, accepted > draft) for draft, product in enumerate(scaled.cumprod(dim=1).unbind(1))]


def _error(said: torch.Tensor, is_right: torch.Tensor) -> float:
    return calibration_error(said.numpy(), is_right.numpy(), NUM_BINS)


if __name__ == "__main__":
    sys.exit(guarded(main))
