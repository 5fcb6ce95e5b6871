"""The rules for speed studies, which accept what is imposed: set rates, or what a recorded run accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import MISSING

from spec_lab.acceptance.rates import check_rates, expand_mean_length
from spec_lab.config.groups import AcceptanceConfig
from spec_lab.config.option import knob, option
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError

if TYPE_CHECKING:
    from spec_lab.build.lab import Lab
    from spec_lab.core.protocols import AcceptanceRule


@option("acceptance", "synthetic")
class Synthetic(AcceptanceConfig):
    """Set rates, for speed studies; the output is neither model's text."""

    greedy_only = "ends a round with the argmax"
    takes_fewer_drafts = True
    judges_trees = True

    mean_length: float = knob(2.5, "acceptance length to impose, from 1 to K + 1, where no rates are given")
    rates: list[float] | None = knob(None, "unconditional rate of each draft position, not increasing")

    def check(self, run: Run) -> Iterator[str]:
        if self.rates is not None and self.mean_length != type(self)().mean_length:
            yield f"acceptance.mean_length={self.mean_length} is not read beside acceptance.rates; use one of them"
        try:
            self._rates(run)
        except UserError as error:
            yield str(error)

    def build(self, lab: Lab) -> AcceptanceRule:
        from spec_lab.acceptance.synthetic import SyntheticAcceptance
        from spec_lab.acceptance.tree import SyntheticTreeAcceptance

        make = SyntheticAcceptance if lab.run.sizes is None else SyntheticTreeAcceptance
        return make(self._rates(lab.run), lab.seeds, lab.device, lab.kernels)

    def _rates(self, run: Run) -> Sequence[float]:
        """Return the acceptance rate of each draft position; UserError if none can be imposed."""
        if self.rates is None:
            return expand_mean_length(self.mean_length, run.drafter.num_draft_tokens)
        check_rates(self.rates, run.drafter.num_draft_tokens)
        return self.rates


@option("acceptance", "replay")
class Replay(AcceptanceConfig):
    """What a recorded run accepted, for speed studies on other shapes; the output is neither model's text."""

    greedy_only = "ends a round with the argmax"
    takes_fewer_drafts = True

    path: str = knob(
        MISSING, "folder of a run of chains of as many drafts, or more; record.confidences=true replays its confidences"
    )

    def build(self, lab: Lab) -> AcceptanceRule:
        from spec_lab.acceptance.replay import RecordedRound, ReplayAcceptance
        from spec_lab.record.reading import read_requests, read_run

        folder, num_draft_tokens = Path(self.path).expanduser(), lab.run.drafter.num_draft_tokens
        requests, needed = read_requests(folder), max(num_draft_tokens, 1)
        least = min((count for each in requests for count in each.offered_per_round or []), default=0)
        if least < needed or read_run(folder).config["tree"]["name"] != "none":
            raise UserError(
                f"acceptance.path={self.path} has rounds that are not chains of {needed} drafts or more; record "
                f"it with drafter.num_draft_tokens={needed} drafter.plan=none tree=none"
            )
        recorded = {}
        for request in requests:
            told = request.accepted_per_round, request.judged_per_round, request.offered_per_round
            rounds = zip(*(column or [] for column in told), request.confidence_per_round or repeat([]), strict=False)
            recorded[request.id] = [
                RecordedRound(judged, accepted >= min(judged, offered), survival)
                for accepted, judged, offered, survival in rounds
            ]
        if lab.confidences is not None and not any(each.survival for rounds in recorded.values() for each in rounds):
            raise UserError(
                f"acceptance.path={self.path} has no confidences to replay; record it with record.confidences=true, "
                "or use record.confidences=false"
            )
        return ReplayAcceptance(
            recorded,
            lab.limits.num_slots,
            num_draft_tokens,
            device=lab.device,
            confidences=lab.confidences,
        )
