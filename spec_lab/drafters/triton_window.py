"""The windows of vanilla MTP are slid in place by a kernel of `spec_kernels`."""

from __future__ import annotations

import torch

from spec_kernels.mtp_window import slide_windows
from spec_lab.drafters.mtp_window import MtpRows, MtpWindow


class TritonMtpWindow(MtpWindow):
    """Does what `MtpWindow` does. No copy of the windows is made."""

    def slide(self, slot_ids: torch.Tensor, inputs: MtpRows, num_valid: torch.Tensor) -> None:
        slide_windows(self.tokens, self.hidden, inputs.tokens, inputs.hidden, slot_ids, num_valid)
