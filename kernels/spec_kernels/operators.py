"""Kernels are launched as torch operators, so that the CPU recorder, counts of launches and profiles see their writes.

They are defined by name, and not by `torch.library.custom_op`, whose wrapper takes ten times as long as a call of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import torch

Parameters = ParamSpec("Parameters")

_operators = torch.library.Library("spec_kernels", "FRAGMENT")


def operator(name: str, mutates_args: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the function below as `torch.ops.spec_kernels.NAME` for tensors of any device, and return the operator.

    `mutates_args` are the arguments that it writes to; it reads the others, and returns nothing. It is for inference.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        schema = name + torch.library.infer_schema(function, mutates_args=mutates_args)
        return _registered(schema, function, "CompositeExplicitAutograd")

    return register


def cpu_operator(schema: str) -> Callable[[Callable[Parameters, None]], Callable[Parameters, None]]:
    """Register the function below as the operator of `schema` on a CPU, and return the operator."""

    def register(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
        return _registered(schema, function, "CPU")

    return register


def _registered(schema: str, function: Callable[Parameters, None], key: str) -> Callable[Parameters, None]:
    name = schema.partition("(")[0]
    _operators.define(schema)
    _operators.impl(name, function, key)
    operator: Callable[Parameters, None] = getattr(torch.ops.spec_kernels, name).default
    return operator


def empty_verdict(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make room for the tokens [batch, N] that are emitted of logits [batch, N, vocab], and how many count [batch]."""
    tokens = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    return tokens, torch.empty_like(tokens[:, 0])
