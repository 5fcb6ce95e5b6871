"""The private names of torch that the lab uses are there: the message names what another torch lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_lab.engine.torch_internals import OperatorMode

HAS_ONEDNN = torch.backends.mkldnn.is_available()
ADD = torch.ops.aten.add.Tensor
OWNERS: list[tuple[Any, str]] = [
    (OperatorMode.__base__, "_should_skip_dynamo"),
    (torch._C, "_dispatch_has_kernel_for_dispatch_key"),
    (torch._C, "DispatchKey"),
    *((ADD, name) for name in ("_op", "_op_dk", "_schema")),
    (torch.empty(0).untyped_storage(), "_cdata"),
    *((torch.ops.aten, name) for name in ("_to_copy", "_index_put_impl_", "_scaled_dot_product_cudnn_attention")),
    *((torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise") if HAS_ONEDNN),
]


@pytest.mark.parametrize(("owner", "name"), OWNERS, ids=[name for _, name in OWNERS])
def test_torch_has_the_private_names_that_are_used(owner: Any, name: str) -> None:
    """Without oneDNN's, models/linear.py would run slower and only warn."""
    assert hasattr(owner, name)
