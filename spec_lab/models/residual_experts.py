"""The second half of a layer with experts, for up to 16 rows in two launches: norm and router; experts with their sum,
the shared one and the residual, which of one row are two; kernels=triton."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

from spec_kernels.expert_tiles import MAX_INVARIANT_ROWS
from spec_kernels.gated_share import add_gated_share
from spec_kernels.routing import can_choose
from spec_lab.checkpoints.expert_sizes import ExpertSizes
from spec_lab.models.experts import ExpertMLP, GatedSharedExpert
from spec_lab.models.layers import GatedMLP, RowsPart
from spec_lab.models.linear import DenseLinear
from spec_lab.models.norms import WeightedNorm
from spec_lab.models.triton_experts import SharedWeights, TritonExperts, TritonRouter, triton_router
from spec_lab.models.triton_linear import SkinnyMLP, dense


class ResidualExperts:
    """Adds the experts of the normed stream to it.

    More than 16 rows go through the norm and the `ExpertMLP` as it is by then: the run's kernels replace its parts.
    """

    __slots__ = ("_eps", "_experts", "_many_norm", "_mlp", "_norm_weight", "_router", "_share", "_shared")

    def __init__(self, mlp: ExpertMLP, norm: WeightedNorm, many_norm: RowsPart) -> None:
        """Take experts whose choice has a kernel (`fits_few_rows`), and the norm before them, for many rows too."""
        self._mlp = mlp
        self._norm_weight, self._eps = norm.kernel_weight, norm.eps
        self._many_norm = many_norm
        self._router = cast(TritonRouter, mlp.router.made_by(triton_router))
        self._experts = cast(TritonExperts, mlp.experts.made_by(TritonExperts))
        self._shared = shared_weights(mlp)
        self._share = SharedPart(cast(GatedSharedExpert, mlp.shared)) if mlp.sizes.shared_gate else None

    def __call__(self, stream: torch.Tensor) -> torch.Tensor:
        mlp = self._mlp
        if not 0 < len(stream) <= MAX_INVARIANT_ROWS:
            return stream + mlp(self._many_norm(stream))
        routing, rows = self._router.of_few(stream, self._norm_weight, self._eps)
        mlp.observe(routing)
        if self._share is not None:
            stream = self._share(stream, rows)
        elif mlp.shared is not None and self._shared is None:
            stream = stream + mlp.shared(rows)
        return self._experts.added_to(stream, rows, routing, self._shared)


class SharedPart:
    """Adds a gated shared expert of few rows to the stream, in three launches."""

    __slots__ = ("_gate", "_mlp")

    def __init__(self, plain: GatedSharedExpert) -> None:
        self._gate = dense(plain.gate).weight
        self._mlp = SkinnyMLP(plain.mlp)

    def __call__(self, stream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(stream)
        add_gated_share(out, stream, rows, self._gate, self._mlp(rows))
        return out


class FinishWithExperts:
    """Adds the experts of a norm to the stream, of many rows: the residual is part of the experts' sum."""

    __slots__ = ("_experts", "_mlp")

    def __init__(self, mlp: ExpertMLP) -> None:
        self._mlp = mlp
        self._experts = cast(TritonExperts, mlp.experts.made_by(TritonExperts))

    def __call__(self, stream: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        mlp = self._mlp
        routing = mlp.router(normed)
        mlp.observe(routing)
        if mlp.shared is not None:
            stream = stream + mlp.shared(normed)
        return self._experts.added_to(stream, normed, routing, None)


def fits_few_rows(sizes: ExpertSizes) -> bool:
    """Tell whether the kernel of few rows has the choice of these experts."""
    return can_choose(sizes.num_experts, sizes.num_groups, sizes.num_chosen_groups)


def shared_weights(mlp: ExpertMLP) -> SharedWeights | None:
    """Return the weights of a shared expert that is one more expert of the same size; a gated one is not."""
    sizes = mlp.sizes
    if sizes.shared_intermediate_size != sizes.intermediate_size or sizes.shared_gate:
        return None
    shared = cast(GatedMLP, mlp.shared)
    assert shared.activation is F.silu, "as the routed experts of these families have"
    gate_up, down = (cast(DenseLinear, linear).weight for linear in (shared.gate_up, shared.down))
    return SharedWeights(gate_up, down)
