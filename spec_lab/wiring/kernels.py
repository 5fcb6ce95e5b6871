"""This module makes of `kernels=` what computes the small steps of a round, a field for each part that has a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from spec_kernels.confidence_reference import count_offered_reference, note_confidence_reference
from spec_kernels.stops_reference import going_on_reference
from spec_lab.acceptance.confidences import NoteConfidence
from spec_lab.acceptance.deterministic import DeterministicRule
from spec_lab.acceptance.distribution import SamplingParams
from spec_lab.acceptance.draft_sampling import DraftSampler, sample_and_keep
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.rejection import METHODS, RejectionAcceptance
from spec_lab.acceptance.standing import RoundStanding, round_standing
from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.acceptance.synthetic import SyntheticAcceptance
from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.core.layer_protocols import RopeWrite
from spec_lab.core.protocols import AcceptanceRule
from spec_lab.drafters.catchup import CatchupPlanner, plan_catchup
from spec_lab.drafters.mtp_window import MtpWindow
from spec_lab.engine.graphs.draft_loops import DraftCarry, carry_every_tensor
from spec_lab.engine.offered import CountOffered
from spec_lab.engine.slots import CommitRows, commit_rows
from spec_lab.engine.stops import GoingOn
from spec_lab.errors import UserError
from spec_lab.models.delta_caches import TORCH_DELTA, DeltaParts
from spec_lab.models.experts import ExpertsMaker, grouped_experts
from spec_lab.models.products import PLAIN, Products
from spec_lab.models.routers import RouterMaker, torch_router
from spec_lab.wiring.tree_kernels import TORCH_TREES, TreeKernels, triton_trees
from spec_lab.wiring.triton import require_triton


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions and classes that `kernels=` chooses.

    Attributes:
        strict: makes the rule of acceptance=strict.
        synthetic: makes that of acceptance=synthetic, from its rates, the seeds and the device.
        rejection: makes that of acceptance=rejection, from its method, the sampling, the seeds and whether it is
            lossless.
        standing: how acceptance=relaxed_thinking looks at the drafts.
        sample_draft: how drafts are drawn.
        note_confidence: how it is noted how sure the drafter is of a draft.
        count_offered: how many drafts a request offers by that.
        plan_catchup: where the rows of a catch-up step stand.
        commit_rows: what a round leaves in the slots.
        carry_hidden: between two replayed steps of a drafter that hands tokens and a hidden state on.
        mtp_window: the windows of drafter=mtp_vanilla.
        going_on: which requests go on behind a round that the host does not look at.
        torch_attention: the backend of attention=torch.
        rope_write: of attention layers whose heads it fits; None is rotation, then the backend's write.
        router: makes the router of a layer's experts.
        experts: makes the experts from their weights.
        products: gives what few rows of a target or draft head go through.
        draft_model_products: the same for those of drafter=draft_model.
        delta: of layers with a gated delta net: what they compute between their products, and how states are kept.
        trees: of rounds whose drafts are a tree.
    """

    strict: Callable[[], DeterministicRule]
    synthetic: Callable[[Sequence[float], SlotSeeds, torch.device], AcceptanceRule]
    rejection: Callable[[str, SamplingParams, SlotSeeds, bool], AcceptanceRule]
    standing: RoundStanding
    sample_draft: DraftSampler
    note_confidence: NoteConfidence
    count_offered: CountOffered
    plan_catchup: CatchupPlanner
    commit_rows: CommitRows
    carry_hidden: DraftCarry
    mtp_window: type[MtpWindow]
    going_on: GoingOn
    rope_write: RopeWrite | None
    torch_attention: type[TorchAttention]
    router: RouterMaker
    experts: ExpertsMaker
    products: Products
    draft_model_products: Products
    delta: DeltaParts
    trees: TreeKernels


def _torch_rejection(method: str, sampling: SamplingParams, seeds: SlotSeeds, lossless: bool) -> AcceptanceRule:
    return RejectionAcceptance(METHODS[method], sampling, seeds, lossless=lossless)


TORCH = Kernels(
    strict=StrictAcceptance,
    synthetic=SyntheticAcceptance,
    rejection=_torch_rejection,
    standing=round_standing,
    sample_draft=sample_and_keep,
    note_confidence=note_confidence_reference,
    count_offered=count_offered_reference,
    plan_catchup=plan_catchup,
    commit_rows=commit_rows,
    carry_hidden=carry_every_tensor,
    mtp_window=MtpWindow,
    going_on=going_on_reference,
    rope_write=None,
    torch_attention=TorchAttention,
    router=torch_router,
    experts=grouped_experts,
    products=PLAIN,
    draft_model_products=PLAIN,
    delta=TORCH_DELTA,
    trees=TORCH_TREES,
)


def _torch(device: torch.device, dtype: torch.dtype, row_invariant: bool = True) -> Kernels:
    return TORCH


def _triton(device: torch.device, dtype: torch.dtype, row_invariant: bool = True) -> Kernels:
    require_triton("kernels", device, dtype)
    from spec_kernels.confidence import count_offered, note_confidence
    from spec_kernels.rope_write import rope_write
    from spec_kernels.stops import going_on
    from spec_lab.acceptance.triton_rules import (
        TritonRejectionAcceptance,
        TritonStrictAcceptance,
        TritonSyntheticAcceptance,
        triton_standing,
    )
    from spec_lab.acceptance.triton_sampling import triton_sample_and_keep
    from spec_lab.drafters.triton_window import TritonMtpWindow
    from spec_lab.engine.graphs.triton_carry import triton_carry
    from spec_lab.models.triton_delta import TRITON_DELTA
    from spec_lab.models.triton_experts import TritonExperts, triton_router

    return Kernels(
        strict=TritonStrictAcceptance,
        synthetic=TritonSyntheticAcceptance,
        rejection=TritonRejectionAcceptance,
        standing=triton_standing,
        sample_draft=triton_sample_and_keep,
        note_confidence=note_confidence,
        count_offered=count_offered,
        plan_catchup=plan_catchup,
        commit_rows=commit_rows,
        carry_hidden=triton_carry,
        mtp_window=TritonMtpWindow,
        going_on=going_on,
        rope_write=rope_write,
        torch_attention=TorchAttention,
        router=triton_router,
        experts=TritonExperts,
        products=_triton_products(dtype, row_invariant),
        draft_model_products=PLAIN,
        delta=TRITON_DELTA,
        trees=triton_trees(),
    )


def _native(device: torch.device, dtype: torch.dtype, row_invariant: bool = True) -> Kernels:
    from spec_kernels.native.build import library
    from spec_kernels.native.compiler import BuildError
    from spec_lab.acceptance.native_rules import NativeStrictAcceptance
    from spec_lab.attention.native_backend import NativeAttention
    from spec_lab.drafters.native_catchup import plan_native_catchup
    from spec_lab.engine.native_slots import commit_native_rows
    from spec_lab.models.native_products import NativeProducts

    try:
        library()
    except BuildError as error:
        raise UserError(f"kernels=native: {error}; use kernels=torch") from error
    products = NativeProducts()
    return replace(
        TORCH,
        strict=NativeStrictAcceptance,
        plan_catchup=plan_native_catchup,
        commit_rows=commit_native_rows,
        torch_attention=NativeAttention,
        products=products,
        draft_model_products=products,
    )


def _triton_products(dtype: torch.dtype, row_invariant: bool) -> Products:
    """Leave float32 to the library: exact products are slow on tensor cores, and TF32 would not be exact."""
    if dtype is torch.float32:
        return PLAIN
    from spec_lab.models.triton_latent import TritonLayerProducts
    from spec_lab.models.triton_products import TritonProducts

    return TritonLayerProducts() if row_invariant else TritonProducts(row_invariant=False)


class KernelsMaker(Protocol):
    """Makes the kernels of a run; `row_invariant` is that run's knob."""

    def __call__(self, device: torch.device, dtype: torch.dtype, row_invariant: bool = True) -> Kernels: ...


KERNELS: Mapping[str, KernelsMaker] = {"torch": _torch, "triton": _triton, "native": _native}
