"""The audit of greedy runs: does the output equal plain decoding's, and if not, is it a near-tie or a bug?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from spec_lab.core.results import RequestRecord
from spec_lab.core.types import FinishReason
from spec_lab.engine.teacher import GreedyChoice, TeacherForcing
from spec_lab.record.models import Divergence

FLOAT32_TIE = 1e-4

NOISE_SPREAD = 6
"""This multiple of the noise (a root mean square) covers all but about one in a thousand positions."""

MOST_STEPS = 16
"""In 16 bits, a token that is more than this many rounding steps of the top logit below it is a bug, however noisy the
target."""


def tie_tolerance(dtype: torch.dtype, top_logit: float, noise: float = 0.0) -> float:
    """Return how far a token's logit may be below the top logit so that rounding can still make it the argmax.

    In float32 it is 1e-4; products of four rows and of one row differ by about 1e-6. In 16-bit types the logits
    themselves are rounded, to eps * |logit|. The tolerance is two such steps, which is coarse, so the audit is weak.

    There every layer rounds the residual stream too, which changes margins by `noise`. So forwards with different
    numbers of rows differ by more than the rounding steps of a logit. With any kernels, 1 % of the pocket target's
    margins differ from float32's by more than two steps (docs/log/lossless_bf16.md). The tolerance is then a multiple
    of the noise, up to `MOST_STEPS`.
    """
    if dtype == torch.float32:
        return FLOAT32_TIE
    step = torch.finfo(dtype).eps * abs(top_logit)
    return max(2 * step, min(NOISE_SPREAD * noise, MOST_STEPS * step))


def audit(
    records: Iterable[RequestRecord],
    plain_outputs: Mapping[str, Sequence[int]] | None,
    teacher: TeacherForcing,
    dtype: torch.dtype,
    lossless: bool = True,
) -> dict[str, Divergence]:
    """Find the first token of each request that plain decoding would not have emitted, by request id; a request whose
    output is plain decoding's has no entry.

    Args:
        plain_outputs: outputs of the plain reference by request id; without one the target scores the text by teacher
            forcing, which by induction gives the same result.
        lossless: whether the rule promises plain decoding's tokens; if not, divergences are expected.
    """
    judge = _Judge(teacher, dtype)
    found: dict[str, Divergence] = {}
    for record in records:
        divergence = (
            judge.against_target(record)
            if plain_outputs is None
            else judge.against_plain(record, list(plain_outputs[record.request_id]))
        )
        if divergence is not None:
            found[record.request_id] = divergence if lossless else divergence.model_copy(update={"kind": "lossy"})
    return found


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return how many first tokens of two texts are the same."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


@dataclass(slots=True)
class _Judge:
    """Finds where an output diverges. It measures the target's rounding noise at most once, when it is needed."""

    teacher: TeacherForcing
    dtype: torch.dtype
    noise: float | None = None

    def against_plain(self, record: RequestRecord, plain: list[int]) -> Divergence | None:
        if record.output_ids == plain:
            return None
        index = first_difference(record.output_ids, plain)
        shorter = min(len(record.output_ids), len(plain))
        if index == shorter:  # one text is a prefix of the other, which no near-tie explains
            return Divergence(index=index, margin=None, kind="bug")
        choice = self.teacher.greedy_choices(record.prompt_ids, record.output_ids[: index + 1])
        return self._judged(record, index, choice)

    def against_target(self, record: RequestRecord) -> Divergence | None:
        if not _ends_where_it_should(record, self.teacher.eos_token_ids):
            return Divergence(index=len(record.output_ids), margin=None, kind="bug")
        choice = self.teacher.greedy_choices(record.prompt_ids, record.output_ids)
        index = first_difference(record.output_ids, choice.token_ids)
        return None if index == len(record.output_ids) else self._judged(record, index, choice)

    def _judged(self, record: RequestRecord, index: int, choice: GreedyChoice) -> Divergence:
        """Return the divergence, which is a near-tie only if the emitted token is within rounding of plain
        decoding's."""
        gap, top_logit = choice.gaps[index], choice.top_logits[index]
        is_tie = gap < tie_tolerance(self.dtype, top_logit)
        if not is_tie and self.dtype != torch.float32:
            if self.noise is None:
                self.noise = self.teacher.margin_noise([*record.prompt_ids, *record.output_ids])
            is_tie = gap < tie_tolerance(self.dtype, top_logit, self.noise)
        return Divergence(index=index, margin=choice.margins[index], kind="near_tie" if is_tie else "bug")


def _ends_where_it_should(record: RequestRecord, eos_token_ids: frozenset[int]) -> bool:
    if record.finish_reason is FinishReason.EOS:
        return record.output_ids[-1] in eos_token_ids
    if record.finish_reason is FinishReason.STOP:
        return len(record.output_ids) <= record.max_new_tokens
    return len(record.output_ids) == record.max_new_tokens
