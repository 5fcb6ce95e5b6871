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


def near_tie_tolerance(dtype: torch.dtype, top_logit: float) -> float:
    """Return the largest distance of a token's logit below the top logit at which rounding of logits can still make it
    the argmax.

    In float32 it is 1e-4; products of four rows and of one row differ by about 1e-6. In 16-bit types the logits
    themselves are rounded, to eps * |logit|. The tolerance is two such steps, which is coarse, so the audit is weak.
    """
    return FLOAT32_TIE if dtype == torch.float32 else 2 * torch.finfo(dtype).eps * abs(top_logit)


def noise_tolerance(dtype: torch.dtype, top_logit: float, noise: float) -> float:
    """Return the same tolerance if values before the logits are rounded too, which changes margins by `noise`.

    In 16-bit types every layer rounds the residual stream. So forwards with different numbers of rows differ by more
    than the rounding steps of a logit. With any kernels, 1 % of the pocket target's margins differ from float32's by
    more than `near_tie_tolerance` (docs/log/lossless_bf16.md). The result is the larger of the two tolerances, up to
    `MOST_STEPS`. In float32 it is `near_tie_tolerance`.
    """
    logits_alone = near_tie_tolerance(dtype, top_logit)
    if dtype == torch.float32:
        return logits_alone
    most = MOST_STEPS * torch.finfo(dtype).eps * abs(top_logit)
    return max(logits_alone, min(NOISE_SPREAD * noise, most))


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
        if index == min(
            len(record.output_ids), len(plain)
        ):  # one text is a prefix of the other, which no near-tie explains
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
        is_tie = gap < near_tie_tolerance(self.dtype, top_logit) or self._is_noise(record, gap, top_logit)
        return Divergence(index=index, margin=choice.margins[index], kind="near_tie" if is_tie else "bug")

    def _is_noise(self, record: RequestRecord, gap: float, top_logit: float) -> bool:
        if self.dtype == torch.float32:
            return False
        if self.noise is None:
            self.noise = self.teacher.margin_noise([*record.prompt_ids, *record.output_ids])
        return gap < noise_tolerance(self.dtype, top_logit, self.noise)


def _ends_where_it_should(record: RequestRecord, eos_token_ids: frozenset[int]) -> bool:
    if record.finish_reason is FinishReason.EOS:
        return record.output_ids[-1] in eos_token_ids
    if record.finish_reason is FinishReason.STOP:
        return len(record.output_ids) <= record.max_new_tokens
    return len(record.output_ids) == record.max_new_tokens
