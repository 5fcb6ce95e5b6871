"""The audit of greedy runs: is the output plain decoding's, and where it is not, is that a near-tie or a bug?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from spec_lab.core.results import RequestRecord
from spec_lab.core.types import FinishReason
from spec_lab.engine.teacher import GreedyChoice, TeacherForcing
from spec_lab.record.measured import Divergence

FLOAT32_TIE = 1e-4


def near_tie_tolerance(dtype: torch.dtype, top_logit: float) -> float:
    """Says how far under the largest logit a token may lie that rounding alone can put first.

    1e-4 in float32: a product of four rows and of one row differ by some 1e-6. In 16-bit types the logits themselves
    are rounded, to eps * |logit|, which is coarse: two such steps, and the audit there is a weak one.
    """
    return FLOAT32_TIE if dtype == torch.float32 else 2 * torch.finfo(dtype).eps * abs(top_logit)


def audit(
    records: Iterable[RequestRecord],
    plain_outputs: Mapping[str, Sequence[int]] | None,
    teacher: TeacherForcing,
    dtype: torch.dtype,
    lossless: bool = True,
) -> list[Divergence]:
    """The first token of each request that plain decoding would not have emitted.

    Args:
        plain_outputs: outputs of the plain reference by request id; without one the target scores the text itself by
            teacher forcing, which by induction says the same.
        lossless: whether the rule promises plain decoding's tokens; where it does not, a divergence is its price.
    """
    divergences = (
        _against_target(record, teacher, dtype)
        if plain_outputs is None
        else _against_plain(record, list(plain_outputs[record.request_id]), teacher, dtype)
        for record in records
    )
    found = [divergence for divergence in divergences if divergence is not None]
    return found if lossless else [replace(divergence, kind="lossy") for divergence in found]


def _against_plain(
    record: RequestRecord, plain: list[int], teacher: TeacherForcing, dtype: torch.dtype
) -> Divergence | None:
    if record.output_ids == plain:
        return None
    pairs = enumerate(zip(record.output_ids, plain, strict=False))
    shorter = min(len(record.output_ids), len(plain))
    index = next((i for i, (ours, theirs) in pairs if ours != theirs), shorter)
    if index == shorter:  # equal so far, then one ends: no tie explains it
        return Divergence(record.request_id, index, None, "bug")
    choice = teacher.greedy_choices(record.prompt_ids, record.output_ids[: index + 1])
    return _judge(record, index, choice, dtype)


def _against_target(record: RequestRecord, teacher: TeacherForcing, dtype: torch.dtype) -> Divergence | None:
    if not _ends_where_it_should(record, teacher.eos_token_ids):
        return Divergence(record.request_id, len(record.output_ids), None, "bug")
    choice = teacher.greedy_choices(record.prompt_ids, record.output_ids)
    for index, (ours, theirs) in enumerate(zip(record.output_ids, choice.token_ids, strict=True)):
        if ours != theirs:
            return _judge(record, index, choice, dtype)
    return None


def _ends_where_it_should(record: RequestRecord, eos_token_ids: frozenset[int]) -> bool:
    if record.finish_reason is FinishReason.EOS:
        return record.output_ids[-1] in eos_token_ids
    return len(record.output_ids) == record.max_new_tokens


def _judge(record: RequestRecord, index: int, choice: GreedyChoice, dtype: torch.dtype) -> Divergence:
    """A near-tie only if the emitted token itself is within rounding of plain decoding's choice."""
    is_tie = choice.gaps[index] < near_tie_tolerance(dtype, choice.top_logits[index])
    return Divergence(record.request_id, index, choice.margins[index], "near_tie" if is_tie else "bug")
