"""The rows of prompts round alike in every pack: the library multiplies them, and splits no product's inputs.

A tensor core adds sixteen products at a time to each sum, in the order of the inputs. Which of the library's tiles
computes a sum then changes nothing about its bits. Inputs that several programs share are added up in another order:
so splitting is forbidden, and so are the products of few rows, which share. A last layer may keep the last row alone,
and a drafter may want all of them; either way the row has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import torch
import torch.nn.functional as F

from spec_lab.core.prompts import PromptRounding

LEAST_ROWS = 128
"""From here on rows are many to every part of a layer."""
_OF_PROMPTS: ContextVar[bool] = ContextVar("rows of prompts", default=False)


def are_few(rows: torch.Tensor, most: int) -> bool:
    """Tell whether a product of these rows, `most` or less, has kernels of its own; rows of prompts have none."""
    return 0 < rows.shape[0] <= most and not _OF_PROMPTS.get()


def filled(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of prompts with zeros behind them up to `LEAST_ROWS`: where the library adds to what it multiplies,
    it splits the inputs of a few rows all the same."""
    num_missing = LEAST_ROWS - rows.shape[0] if _OF_PROMPTS.get() else 0
    return F.pad(rows, (0, 0, 0, num_missing)) if num_missing > 0 else rows


@contextmanager
def inputs_unsplit() -> Iterator[None]:
    """Let the library multiply, on a GPU cuBLASLt, by algorithms that do not split the inputs."""
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


PROMPTS_ALIKE = PromptRounding(LEAST_ROWS, inputs_unsplit)
