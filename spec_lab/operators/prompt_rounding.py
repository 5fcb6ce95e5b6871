"""Makes the rows of prompts round in the same way in every pack: the library multiplies them, without split inputs.

A tensor core adds sixteen products at a time to each sum, in the order of the inputs. So the bits of a sum do not
depend on the library's tile. If several programs split the inputs, the order differs. So splitting is forbidden, and
our products of few rows, which split, are not used. The last row of a prompt then has the same bits whether the last
layer keeps only this row or, for a drafter, all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import torch
import torch.nn.functional as F

from spec_kernels.attention_tiles import MAX_DECODE_QUERIES
from spec_lab.core.prompts import PromptRounding

LEAST_ROWS = 128
"""From this number of rows on, no part of a layer uses its form for few rows."""
_OF_PROMPTS: ContextVar[bool] = ContextVar("rows of prompts", default=False)


def are_few(rows: torch.Tensor, most: int) -> bool:
    """Return whether rows are few enough, up to `most`, for our products; never within `inputs_unsplit`."""
    return 0 < rows.shape[0] <= most and not _OF_PROMPTS.get()


def filled(rows: torch.Tensor) -> torch.Tensor:
    """Pad rows with zero rows to `LEAST_ROWS`, within `inputs_unsplit`. With fewer rows, the library splits the inputs
    of a product that is added to its output, even if that is forbidden."""
    num_missing = LEAST_ROWS - rows.shape[0] if _OF_PROMPTS.get() else 0
    return F.pad(rows, (0, 0, 0, num_missing)) if num_missing > 0 else rows


@contextmanager
def inputs_unsplit() -> Iterator[None]:
    """Make the library (on a GPU, cuBLASLt) use only algorithms that do not split the inputs of products."""
    token = _OF_PROMPTS.set(True)
    try:
        with _unsplit() if torch.cuda.is_available() else nullcontext():
            yield
    finally:
        _OF_PROMPTS.reset(token)


@contextmanager
def _unsplit() -> Iterator[None]:
    backends, matmul = torch.backends.cuda, torch.backends.cuda.matmul
    library = backends.preferred_blas_library()
    names = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"
    before = {name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in names}
    backends.preferred_blas_library("cublaslt")
    try:
        for name in names:
            setattr(matmul, name, (False, False))
        yield
    finally:
        for name, allowed in before.items():
            setattr(matmul, name, allowed)
        backends.preferred_blas_library(library)


PROMPTS_ALIKE = PromptRounding(LEAST_ROWS, inputs_unsplit, MAX_DECODE_QUERIES + 1)
