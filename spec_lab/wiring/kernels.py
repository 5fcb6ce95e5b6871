"""This module makes of `kernels=` what computes the small steps of a round, a field for each part that has a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.core.errors import UserError
from spec_lab.core.layer_protocols import RopeWrite
from spec_lab.models.delta_caches import TORCH_DELTA, DeltaParts
from spec_lab.models.experts import ExpertsMaker, grouped_experts
from spec_lab.models.products import PLAIN, Products
from spec_lab.models.routers import RouterMaker, torch_router
from spec_lab.operators.kernel_set import KernelSet
from spec_lab.wiring.triton import require_triton


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels(KernelSet):
    """The functions and classes that `kernels=` chooses.

    Attributes:
        torch_attention: the backend of attention=torch.
        rope_write: of attention layers whose heads it fits; None is rotation, then the backend's write.
        router: makes the router of a layer's experts.
        experts: makes the experts from their weights.
        products: gives what few rows of a target or draft head go through.
        draft_model_products: the same for those of drafter=draft_model.
        delta: of layers with a gated delta net: what they compute between their products, and how states are kept.
    """

    rope_write: RopeWrite | None
    torch_attention: type[TorchAttention]
    router: RouterMaker
    experts: ExpertsMaker
    products: Products
    draft_model_products: Products
    delta: DeltaParts


TORCH = Kernels(
    rope_write=None,
    torch_attention=TorchAttention,
    router=torch_router,
    experts=grouped_experts,
    products=PLAIN,
    draft_model_products=PLAIN,
    delta=TORCH_DELTA,
)


def _torch(device: torch.device, dtype: torch.dtype, row_invariant: bool = True) -> Kernels:
    return TORCH


def _triton(device: torch.device, dtype: torch.dtype, row_invariant: bool = True) -> Kernels:
    require_triton("kernels", device, dtype)
    from spec_kernels.rope_write import rope_write
    from spec_lab.operators.triton_delta import TRITON_DELTA
    from spec_lab.operators.triton_experts import TritonExperts, triton_router
    from spec_lab.operators.triton_set import TRITON_FUNCTIONS

    return Kernels(
        functions=TRITON_FUNCTIONS,
        rope_write=rope_write,
        torch_attention=TorchAttention,
        router=triton_router,
        experts=TritonExperts,
        products=_triton_products(dtype, row_invariant),
        draft_model_products=PLAIN,
        delta=TRITON_DELTA,
    )


def require_native() -> None:
    """Raise UserError where the kernels in C cannot be compiled; nothing of them is called before."""
    from spec_kernels.native.build import library
    from spec_kernels.native.compiler import BuildError

    try:
        library()
    except BuildError as error:
        raise UserError(f"kernels=native: {error}; use kernels=torch") from error


def _native(device: torch.device, dtype: torch.dtype, row_invariant: bool = True) -> Kernels:
    require_native()
    from spec_lab.attention.native_backend import NativeAttention
    from spec_lab.operators.native_set import NATIVE_FUNCTIONS, NativeProducts

    products = NativeProducts()
    return replace(
        TORCH,
        functions=NATIVE_FUNCTIONS,
        torch_attention=NativeAttention,
        products=products,
        draft_model_products=products,
    )


def _triton_products(dtype: torch.dtype, row_invariant: bool) -> Products:
    """Leave float32 to the library: exact products are slow on tensor cores, and TF32 would not be exact."""
    if dtype is torch.float32:
        return PLAIN
    from spec_lab.operators.triton_products import TritonProducts

    return TritonProducts(row_invariant)


class KernelsMaker(Protocol):
    """Makes the kernels of a run; `row_invariant` is that run's knob."""

    def __call__(self, device: torch.device, dtype: torch.dtype, row_invariant: bool = True) -> Kernels: ...


KERNELS: Mapping[str, KernelsMaker] = {"torch": _torch, "triton": _triton, "native": _native}
