"""Registers kernels as torch operators, so that graphs on a CPU, launch counts and profiles see each launch.

A kernel in Triton returns what it makes, as its torch form does, and writes in place only what outlives the call. Code
in C writes to tensors that it is given, since the recorder of a CPU would copy what it returns.

It does not use `torch.library.custom_op`, whose wrapper makes a call ten times as slow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_operators = torch.library.Library("spec_kernels", "FRAGMENT")


def operator(
    name: str, mutates_args: tuple[str, ...] = (), devices: str = "CompositeExplicitAutograd"
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return a decorator that registers a function as `torch.ops.spec_kernels.NAME`, and returns the operator.

    `mutates_args` are the arguments that the function writes; it only reads the others, and returns new tensors or
    nothing. There is no autograd. `devices` is a dispatch key of torch, by default that of any device.
    """

    def register(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        _operators.define(name + torch.library.infer_schema(function, mutates_args=mutates_args))
        _operators.impl(name, function, devices)
        registered: Callable[Parameters, Result] = getattr(torch.ops.spec_kernels, name).default
        return registered

    return register


cpu_operator = partial(operator, devices="CPU")
"""`operator` for functions of CPU tensors only."""


def empty_verdict(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the emitted tokens [batch, N], and the number of them [batch], for logits [batch, N, vocab]."""
    tokens = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    return tokens, torch.empty_like(tokens[:, 0])
