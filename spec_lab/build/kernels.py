"""Makes the set of kernels for `kernels=`, with a field for each part that may have a kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.core.errors import UserError
from spec_lab.core.layer_protocols import RopeWrite
from spec_lab.models.delta_caches import TORCH_DELTA, DeltaParts
from spec_lab.models.experts import ExpertsMaker, grouped_experts
from spec_lab.models.products import PLAIN, Products
from spec_lab.models.routers import RouterMaker, torch_router
from spec_lab.operators.kernel_set import KernelSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels(KernelSet):
    """The functions and classes that `kernels=` chooses.

    Attributes:
        torch_attention: the backend of attention=torch.
        rope_write: the fused rotation and KV write for heads that it supports; None means rotation, then the backend's
            write.
        router: makes the router of a layer's experts.
        experts: makes the experts from their weights.
        products: makes the parts of a target or draft head.
        draft_model_products: the same for the model of drafter=draft_model.
        delta: for layers with a gated delta net: the computations between their products, and how states are stored.
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


def make_kernels(name: str, device: torch.device, dtype: torch.dtype, row_invariant: bool = True) -> Kernels:
    """Make the kernels of a run; `name` and `row_invariant` are its knobs.

    Raises:
        UserError: Triton's interpreter would compute `dtype` wrongly, or C would read the memory of a GPU.
    """
    if name == "triton":
        refuse_wrong_dots(dtype)
        return _triton(dtype, row_invariant)
    return _native(device) if name == "native" else TORCH


def refuse_wrong_dots(dtype: torch.dtype) -> None:
    """Raise UserError if Triton kernels of this type run in its interpreter, whose products of bfloat16 are wrong."""
    from spec_kernels.utils import INTERPRETED

    if INTERPRETED and dtype is torch.bfloat16:
        raise UserError("Triton's interpreter computes dtype=bfloat16 wrongly; use dtype=float32")


def _triton(dtype: torch.dtype, row_invariant: bool) -> Kernels:
    from spec_kernels.rope_write import rope_write
    from spec_lab.operators.triton_delta import TRITON_DELTA
    from spec_lab.operators.triton_experts import TritonExperts, triton_router
    from spec_lab.operators.triton_products import TritonProducts
    from spec_lab.operators.triton_set import TRITON_FUNCTIONS

    return Kernels(
        functions=TRITON_FUNCTIONS,
        rope_write=rope_write,
        torch_attention=TorchAttention,
        router=triton_router,
        experts=TritonExperts,
        # float32 is left to the library, since tensor cores would only have TF32
        products=PLAIN if dtype is torch.float32 else TritonProducts(row_invariant),
        draft_model_products=PLAIN,
        delta=TRITON_DELTA,
    )


def _native(device: torch.device) -> Kernels:
    if device.type == "cuda":
        raise UserError(f"kernels=native is for a CPU, not device={device}; use kernels=torch")
    from spec_kernels.native.build import library
    from spec_lab.attention.native_backend import NativeAttention
    from spec_lab.operators.native_set import NATIVE_FUNCTIONS, NativeProducts

    library()  # compiled now, before any weight is read
    products = NativeProducts()
    return replace(
        TORCH,
        functions=NATIVE_FUNCTIONS,
        torch_attention=NativeAttention,
        products=products,
        draft_model_products=products,
    )
