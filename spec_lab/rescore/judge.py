"""Computes what another deterministic rule would have accepted on the trajectory of a run, without running a model.

Each round is judged with its recorded drafts, in the thinking phase that the run's own text had there. So the result is
exact for the rule that ran. For another rule it says how the rule judges the same drafts in the same contexts. A run
with that rule would have other rounds after the first difference in acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spec_lab.acceptance.emit import leading
from spec_lab.acceptance.phase import ThinkingMarkers
from spec_lab.acceptance.standing import DraftStanding
from spec_lab.build.lab import RuleFacts
from spec_lab.config.run import AcceptanceConfig
from spec_lab.core.errors import UserError
from spec_lab.core.types import Request
from spec_lab.record.reading import read_request_rows
from spec_lab.record.sinks import REQUESTS_FILE, VERIFY_ROWS_FILE
from spec_lab.record.verify_rows import VerifyRows, load_verify_rows

Indices = np.ndarray[Any, Any]


def rescore(folder: Path, options: AcceptanceConfig, extensions: Sequence[str] = ()) -> dict[str, list[int]]:
    """Return the number of drafts, by request id, that a rule with `options` accepts in each recorded round of a run.

    Drafts count even if the output is cut before them, at an EOS or at the limit of tokens. `extensions` names the
    modules outside this package that may have registered the rule.

    Raises:
        UserError: the run kept no verify rows (`record.topk`) or too few tokens of each row, its files are broken, or
            the rule has no `judge`.
    """
    rows = load_verify_rows(folder)
    return rescore_rows(rows, read_prompts(folder, rows), options, extensions)


def read_prompts(folder: Path, rows: VerifyRows) -> dict[str, list[int]]:
    """Return, by request id, the prompt ids of the requests that have `rows`.

    Raises:
        UserError: `requests.jsonl` is broken or lacks one of them.
    """
    prompts = {row["id"]: row["prompt_ids"] for row in read_request_rows(folder)}
    missing = [request_id for request_id in rows.origin.request_ids if request_id not in prompts]
    if missing:
        raise UserError(
            f"{folder / REQUESTS_FILE}: has no request {missing[0]!r}, but {VERIFY_ROWS_FILE} has rows of it; the two "
            "files belong to different runs, or one was cut short"
        )
    return prompts


def rescore_rows(
    rows: VerifyRows, prompts: Mapping[str, list[int]], options: AcceptanceConfig, extensions: Sequence[str] = ()
) -> dict[str, list[int]]:
    """Judge rows as `rescore` does. Each request has a slot. Step i judges round i of every request that has one."""
    _check_topk(rows, options)
    origin = rows.origin
    context = RuleFacts(
        num_slots=len(origin.request_ids),
        markers=None if origin.markers is None else ThinkingMarkers(*origin.markers),
        eos_token_ids=frozenset(origin.eos_token_ids),
        prefill_chunk=origin.prefill_chunk,
        device=torch.device("cpu"),
    )
    rule = options.judge(context)
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
        more = f"run again with record.topk={topk}" if topk <= 128 else f"use {recorded} or fewer"
        raise UserError(f"acceptance.topk={topk} reads more than the {recorded} recorded tokens of a row; {more}")


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
