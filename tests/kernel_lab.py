"""Kernel tests run on a CUDA device where there is one, else on the CPU in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported and whenever a kernel is defined, so `conftest.py` sets it before any
test module is imported. TRITON_INTERPRET=1 in the environment wins over a CUDA device.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from spec_kernels.utils import INTERPRETED

assert INTERPRETED or torch.cuda.is_available(), "spec_kernels was imported before TRITON_INTERPRET was set"
assert not (INTERPRETED and isinstance(tl.max, JITFunction)), "triton was imported before TRITON_INTERPRET was set"

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
"""The interpreter's bfloat16 products are silently wrong, so bfloat16 is for a GPU."""

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
if not INTERPRETED:
    torch.backends.cuda.matmul.allow_tf32 = False


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare within what the dtype rounds to; NaN is nowhere."""
    assert got.isfinite().all()
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers that are the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class LaunchedKernels(TorchDispatchMode):
    """A dispatch mode that counts every operator of `spec_kernels` that ran, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    @property
    def names(self) -> set[str]:
        return set(self.count)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "spec_kernels":
            self.count[func._schema.name.removeprefix("spec_kernels::")] += 1
        return func(*args, **(kwargs or {}))
