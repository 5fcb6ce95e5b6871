"""Whether oneDNN's packed products, on which the lab's own rest on a CPU, sum a row alike alone and beside others."""

from __future__ import annotations

import pytest
import torch


def _sums_rows_alike() -> bool:
    mkldnn = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(mkldnn, "_reorder_linear_weight"):
        return False
    generator = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(96, 64, generator=generator), torch.randn(8, 64, generator=generator)
    packed = mkldnn._reorder_linear_weight(weight, 4)
    alone, *together = (
        torch.cat([mkldnn._linear_pointwise(part, packed, None, "none", [], "") for part in rows.split(count)])
        for count in (1, 2, 4, 8)
    )
    return all(torch.equal(alone, other) for other in together)


needs_rows_alike = pytest.mark.skipif(
    not _sums_rows_alike(), reason="oneDNN's products of this processor round a row by the rows beside it"
)
