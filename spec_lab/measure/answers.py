"""Checks the answers of a run, each with its prompt's own checker or the one in `workload.checker`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from spec_lab.config.option import get
from spec_lab.core.errors import UserError, describe_error
from spec_lab.core.results import RequestRecord
from spec_lab.core.types import FinishReason, Request
from spec_lab.measure.lab import LoadedRun
from spec_lab.workloads.checker import Checked, check
from spec_lab.workloads.conversations import output_text
from spec_lab.workloads.thinking import thinking_pairs


def check_answers(lab: LoadedRun, name: str, records: Iterable[RequestRecord]) -> dict[str, Checked | None]:
    """Check each answer; the result is None for a prompt without an expected answer, and for all if acceptance is
    imposed."""
    requests = {request.request_id: request for request in lab.requests}
    is_imposed = lab.engines[name].parts.rule.traits.imposed
    return {
        record.request_id: None
        if record.answer is None or is_imposed
        else _check(lab, requests[record.request_id], record)
        for record in records
    }


def note_unread(records: Iterable[RequestRecord], checked: Mapping[str, Checked | None]) -> None:
    """Warn if a checker found no answer in outputs that were not cut by a limit, since it may be the wrong checker."""
    ended = [record.request_id for record in records if record.finish_reason is not FinishReason.LENGTH]
    found = [one for request_id in ended if (one := checked[request_id]) is not None]
    for name in dict.fromkeys(one.checker for one in found):
        reads = [one.read for one in found if one.checker == name]
        num_unread = sum(read is None for read in reads)
        if num_unread:
            print(
                f"checker {name} found no answer in {num_unread} of {len(reads)} outputs that ended; each "
                "counts as wrong, and another checker may read it (docs/use.md)",
                file=sys.stderr,
            )


def _check(lab: LoadedRun, request: Request, record: RequestRecord) -> Checked:
    assert record.answer is not None
    name = request.checker or lab.config.workload.checker
    checker = get("workload.checker", name)
    eos = lab.models.target.eos_token_ids
    text = output_text(lab.tokenizer, request, record.output_ids, eos)
    markers = lab.models.markers
    pairs = thinking_pairs(lab.tokenizer, markers)
    is_open = markers is not None and markers.hide_answer(record.prompt_ids, eos)
    try:
        return check(checker, record.answer, text, is_open, pairs)
    except Exception as error:  # an extension's checker may raise anything
        knob = "workload.checker" if request.checker is None else "checker"
        raise UserError(
            f"{knob}={name} fails on the output of {record.request_id} ({describe_error(error)}); correct it"
        ) from error
