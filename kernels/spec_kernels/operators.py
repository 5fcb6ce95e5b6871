"""Kernels are launched as torch operators, so that the CPU recorder, counts of launches and profiles see their writes.

They are defined by name, and not by `torch.library.custom_op`, whose wrapper takes ten times as long as a call of one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec

import torch

Parameters = ParamSpec("Parameters")

_operators = torch.library.Library("spec_kernels", "FRAGMENT")


def operator(
    name: str, mutates_args: tuple[str, ...], devices: str = "CompositeExplicitAutograd"
) -> Callable[[Callable[Parameters, None]], Callable[Parameters, None]]:
    """Register the function below as `torch.ops.spec_kernels.NAME` for tensors of any device, and return the operator.

    `mutates_args` are the arguments that it writes to; it reads the others, and returns nothing. It is for inference.
    `devices` is a dispatch key of torch.
    """

    def register(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
        _operators.define(name + torch.library.infer_schema(function, mutates_args=mutates_args))
        _operators.impl(name, function, devices)
        registered: Callable[Parameters, None] = getattr(torch.ops.spec_kernels, name).default
        return registered

    return register


cpu_operator = partial(operator, devices="CPU")
"""The same for tensors of a CPU."""


def empty_verdict(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make room for the tokens [batch, N] that are emitted of logits [batch, N, vocab], and how many count [batch]."""
    tokens = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    return tokens, torch.empty_like(tokens[:, 0])
