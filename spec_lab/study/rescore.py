"""Computes what another deterministic rule would have accepted on the trajectory of a run, without running a model.

Each round is judged with its recorded drafts, in the thinking phase that the run's own text had there. So the result is
exact for the rule that ran. For another rule it says how the rule judges the same drafts in the same contexts. A run
with that rule would have other rounds after the first difference in acceptance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from spec_lab.acceptance.emit import leading
from spec_lab.acceptance.standing import DraftStanding
from spec_lab.config.groups import AcceptanceConfig
from spec_lab.core.errors import UserError
from spec_lab.core.types import Request
from spec_lab.record.reading import Found, read_requests
from spec_lab.record.verify_rows import VerifyRows, load_verify_rows
from spec_lab.study.tables import Table

Indices = np.ndarray[Any, Any]


NOTE = (
    "Acceptance length as judged: accepted drafts a round, plus one, over all kept rounds, before any cut. Every rule "
    "judges the drafts of the text that the run wrote, which is exact for the run's own rule, for another one only a "
    "comparison, since its text may differ."
)


def rescore(folder: Path, options: AcceptanceConfig, extensions: Sequence[str] = ()) -> dict[str, list[int]]:
    """Return the number of drafts, by request id, that a rule with `options` accepts in each kept round of a run.
    Drafts count even if the output is cut before them. `extensions` names the modules that may have the rule.

    Raises:
        UserError: the run kept no verify rows (`record.topk`) or too few tokens of each, or the rule has no `judge`.
    """
    rows = load_verify_rows(folder)
    return rescore_rows(rows, {r.id: r.prompt_ids for r in read_requests(folder)}, options, extensions)


def rescore_table(found: Found, rules: Mapping[str, tuple[AcceptanceConfig, Sequence[str]]]) -> Table:
    """Return what other rules would have accepted in a run: a line for each, the run's own first.

    Args:
        rules: the options and the extensions of each rule, by the name that the table shows.
    """
    rows = load_verify_rows(found.folder)
    requests = {request.id: request for request in found.requests}
    prompts = {key: request.prompt_ids for key, request in requests.items()}
    accepted = iter(rows.accepted.tolist())
    counts = zip(rows.origin.request_ids, rows.num_rounds.tolist(), strict=True)
    judged = {
        f"{found.run.choices.get('acceptance')} (the run's own)": {
            k: [next(accepted) for _ in range(n)] for k, n in counts
        }
    }
    judged |= {name: rescore_rows(rows, prompts, *rule) for name, rule in rules.items()}
    lines = []
    for name, of_rule in judged.items():
        line = {"rule": name, "length": _length(of_rule.values())}
        for category in dict.fromkeys(requests[key].category for key in of_rule):
            line[category] = _length(each for key, each in of_rule.items() if requests[key].category == category)
        lines.append(line)
    table = pd.DataFrame(lines)
    table.insert(2, "change", table["length"] - table["length"].iloc[0])
    return Table(
        "Other rules over kept verify rows", table, table.map(lambda x: x if isinstance(x, str) else f"{x:.3f}"), NOTE
    )


def rules_in(arguments: Iterable[str]) -> list[list[str]]:
    """Split arguments into rules: each `acceptance=` begins one, and values separated by commas make several."""
    split: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("acceptance="):
            split.append([])
        if not split or not argument.startswith("acceptance"):
            raise UserError(f"{argument}: a rule is acceptance=RULE, then its acceptance.KNOB=VALUE")
        split[-1].append(argument)
    return [list(each) for rule in split for each in product(*map(_values, rule))]


def rescore_rows(
    rows: VerifyRows, prompts: Mapping[str, list[int]], options: AcceptanceConfig, extensions: Sequence[str] = ()
) -> dict[str, list[int]]:
    """Judge rows as `rescore` does. Each request has a slot. Step i judges round i of every request that has one."""
    _check_topk(rows, options)
    origin = rows.origin
    rule = options.judge(origin)
    for slot, request_id in enumerate(origin.request_ids):
        rule.admit(slot, Request(request_id, "", tuple(prompts[request_id]), max_new_tokens=1))
    first = torch.from_numpy(rows.first_ids).long()
    rule.advance(torch.arange(len(first)), first.unsqueeze(1), torch.ones_like(first))
    starts = np.concatenate(([0], np.cumsum(rows.num_rounds)[:-1])) if len(first) else np.zeros(0, dtype=int)
    accepted: list[list[int]] = [[] for _ in origin.request_ids]
    for index in range(rows.num_rounds.max(initial=0)):
        slots = np.flatnonzero(rows.num_rounds > index)
        at = starts[slots] + index
        drafts = torch.from_numpy(rows.draft_ids[at]).long()
        slot_ids = torch.from_numpy(slots)
        matches = rule.matches(_standing(rows, at, drafts), slot_ids, drafts)
        for slot, count in zip(slots.tolist(), leading(matches).tolist(), strict=True):
            accepted[slot].append(count)
        rule.advance(slot_ids, *_emitted(rows, at, drafts))
    return dict(zip(origin.request_ids, accepted, strict=True))


def _check_topk(rows: VerifyRows, options: AcceptanceConfig) -> None:
    recorded, topk = rows.top_ids.shape[-1], getattr(options, "topk", 1)
    if topk > recorded:
        raise UserError(
            f"acceptance.topk={topk} reads more than the {recorded} kept tokens of a row; set record.topk={topk}"
        )


def _standing(rows: VerifyRows, at: Indices, drafts: torch.Tensor) -> DraftStanding:
    """Return the standing of the drafts [batch, K] of the rounds `at`. A draft that is not among the recorded ranks is
    placed after them."""
    ids = torch.from_numpy(rows.top_ids[at][:, :-1]).long()
    probabilities = torch.from_numpy(rows.top_probabilities[at][:, :-1])
    found = ids == drafts.unsqueeze(-1)
    rank = torch.where(found.any(dim=-1), found.int().argmax(dim=-1), ids.shape[-1])
    return DraftStanding(
        is_top=rank == 0,
        rank=rank,
        probability=torch.where(found, probabilities, 0).sum(dim=-1),
        top=probabilities[..., 0],
        top_probabilities=probabilities,
    )


def _emitted(rows: VerifyRows, at: Indices, drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [batch, N] that the run's own rule chose, before any cut, and the number [batch] of these. The
    tokens behind them are arbitrary."""
    count = torch.from_numpy(rows.accepted[at]).long()
    last = torch.from_numpy(rows.last_ids[at]).long().unsqueeze(1)
    tokens = torch.cat((drafts, last), dim=1).scatter(1, count.unsqueeze(1), last)
    return tokens, count + 1


def _values(argument: str) -> list[str]:
    key, _, values = argument.partition("=")
    return [f"{key}={value}" for value in values.split(",")]


def _length(accepted: Iterable[Sequence[int]]) -> float:
    counts = [count for rounds in accepted for count in rounds]
    return sum(counts) / len(counts) + 1 if counts else float("nan")
