"""The rows of prompts round alike in every pack: the library multiplies them, and splits no product's inputs.

A tensor core adds sixteen products at a time to each sum, in the order of the inputs. Which of the library's tiles
computes a sum then changes nothing about its bits. A product of few rows has other kernels, and inputs that several
programs share are added up in another order: so a forward has at least `LEAST_ROWS`, and splitting is forbidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spec_lab.core.prompts import PromptRounding

LEAST_ROWS = 128
"""From here on rows are many to every part of a layer."""


@contextmanager
def inputs_unsplit() -> Iterator[None]:
    """Let cuBLASLt multiply, by algorithms that do not split the inputs; elsewhere than on a GPU nothing changes."""
    if not torch.cuda.is_available():
        yield
        return
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
