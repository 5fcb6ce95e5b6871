"""Registers kernels as torch operators, so that graphs on a CPU, launch counts and profiles see each launch.

It does not use `torch.library.custom_op`, whose wrapper makes a call ten times as slow.
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
    """Return a decorator that registers a function as `torch.ops.spec_kernels.NAME`, and returns the operator.

    `mutates_args` are the arguments that the function writes; it only reads the others, and returns nothing. There is
    no autograd. `devices` is a dispatch key of torch, by default that of any device.
    """

    def register(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
        _operators.define(name + torch.library.infer_schema(function, mutates_args=mutates_args))
        _operators.impl(name, function, devices)
        registered: Callable[Parameters, None] = getattr(torch.ops.spec_kernels, name).default
        return registered

    return register


cpu_operator = partial(operator, devices="CPU")
"""`operator` for functions of CPU tensors only."""


def empty_verdict(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the emitted tokens [batch, N], and the number of them [batch], for logits [batch, N, vocab]."""
    tokens = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    return tokens, torch.empty_like(tokens[:, 0])
