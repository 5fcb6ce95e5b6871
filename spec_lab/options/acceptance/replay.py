"""acceptance=replay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from spec_lab.config.groups import AcceptanceConfig
from spec_lab.config.option import knob, option
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError

if TYPE_CHECKING:
    from spec_lab.build.lab import Lab
    from spec_lab.core.protocols import AcceptanceRule


@option("acceptance", "replay")
class Replay(AcceptanceConfig):
    """What a recorded run accepted, for speed studies on other shapes; the output is neither model's text."""

    greedy_only = "ends a round with the argmax"
    takes_fewer_drafts = True

    path: str | None = knob(
        None, "folder of the recorded run, of the largest K; record.confidences=true replays its confidences"
    )

    def check(self, run: Run) -> Iterator[str]:
        if self.path is None:
            yield "acceptance=replay replays a recorded run; set acceptance.path to its folder"

    def build(self, lab: Lab) -> AcceptanceRule:
        from spec_lab.acceptance.replay import RecordedRound, ReplayAcceptance
        from spec_lab.record.reading import read_requests

        assert self.path is not None
        recorded = {}
        for request in read_requests(Path(self.path).expanduser()):
            accepted, offered = request.accepted_per_round or [], request.offered_per_round or []
            survival = request.confidence_per_round or [[]] * len(accepted)
            recorded[request.id] = [RecordedRound(*each) for each in zip(accepted, offered, survival, strict=True)]
        rounds = [each for rounds in recorded.values() for each in rounds]
        if not rounds:
            raise UserError(f"acceptance.path={self.path} has no rounds; use the folder of a run with a drafter")
        if lab.confidences is not None and not any(each.survival for each in rounds):
            raise UserError(
                f"acceptance.path={self.path} has no confidences to replay; record it with record.confidences=true, "
                "or use record.confidences=false"
            )
        return ReplayAcceptance(
            recorded,
            lab.limits.num_slots,
            lab.run.max_new_tokens + lab.run.drafter.num_draft_tokens,
            num_draft_tokens=lab.run.drafter.num_draft_tokens,
            device=lab.device,
            confidences=lab.confidences,
        )
