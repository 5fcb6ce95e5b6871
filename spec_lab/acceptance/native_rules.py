"""The rule of kernels=native: strict acceptance in one call. Other rules keep torch."""

from __future__ import annotations

from spec_kernels.native.rounds import strict_accept
from spec_lab.acceptance.strict import StrictAcceptance, verify_by
from spec_lab.core.types import AcceptanceInputs, Verification


class NativeStrictAcceptance(StrictAcceptance):
    """It accepts what `StrictAcceptance` does, in one call."""

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        return verify_by(strict_accept, inputs)
