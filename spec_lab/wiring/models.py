"""The models and the attention backend of a run, which are loaded once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from spec_lab.acceptance.phase import ThinkingMarkers
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.core.errors import UserError
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.prompts import NO_ROUNDING, PromptRounding
from spec_lab.engine.experts_read import ExpertsRead
from spec_lab.menu.choices import WeightDtype, Weights
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.devices import has_cuda
from spec_lab.menu.registry import made
from spec_lab.models.decoder import Decoder
from spec_lab.models.experts import ExpertMLP
from spec_lab.models.partition import WHOLE, Partition
from spec_lab.models.products import PLAIN
from spec_lab.models.target_loader import WeightSource, load_target
from spec_lab.wiring.attention import BackendContext
from spec_lab.wiring.kernels import KERNELS, Kernels
from spec_lab.wiring.limits import rows_behind

Beside = TypeVar("Beside")
KEPT_IN: Mapping[WeightDtype, torch.dtype | None] = {
    WeightDtype.auto: None,
    WeightDtype.fp8: torch.float8_e4m3fn,
    WeightDtype.bfloat16: torch.bfloat16,
}
"""The dtype that weights are rounded to, by `target.weight_dtype`, as `WeightSource` takes it."""


POSITIONS_BEHIND = 32
"""Minimum number of positions past the longest sequence in rotary tables, if the target has so many."""


@dataclass(frozen=True, slots=True)
class DrafterBuild:
    """The parts, in addition to its own weights, that a drafter is made from.

    Attributes:
        kernels: the run's kernels.
        experts_read: counters for the layers with experts.
        warnings: what the record must say of this run, in sentences; a loader may add to it.
    """

    target: Decoder
    backend: AttentionBackend
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    experts_read: ExpertsRead
    warnings: list[str]

    def beside_target(
        self, model: Callable[..., Beside], config: object, tensors: Mapping[str, torch.Tensor]
    ) -> Beside:
        """Make a model from its checkpoint's tensors, with the target's embedding, head and number of positions."""
        target = self.target
        return model(
            config,
            tensors,
            embedding=target.embedding,
            target_head=target.head_weight,
            backend=self.backend,
            max_positions=target.num_positions,
            products=self.kernels.products,
        )

    def adopt(self, parts: Iterable[ExpertMLP]) -> None:
        """Replace the routers and experts of `parts` by those of the run's kernels, and count the experts read."""
        adopted = tuple(parts)
        for part in adopted:
            part.router = part.router.made_by(self.kernels.router)
            part.experts = part.experts.made_by(self.kernels.experts)
        self.experts_read.watch(adopted)


@dataclass(frozen=True, slots=True)
class TargetBuild:
    """A loaded target with related parts, which all engines of a run share.

    Attributes:
        kernels: the run's kernels.
        experts_read: counters for the layers with experts, of the target and the drafter.
        markers: markers of the thinking phase; None if none are given.
        warnings: what the record must say of this run, in sentences.
    """

    target: Decoder
    backend: AttentionBackend
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    experts_read: ExpertsRead
    markers: ThinkingMarkers | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def row_invariant(self) -> bool:
        """Return whether a target forward of several rows, up to `invariant_rows`, gives each row the bits that it
        would have alone."""
        return self.invariant_rows > 1

    @property
    def invariant_rows(self) -> int:
        """Return the largest number of rows in a target forward for which each row is bit for bit as if it were alone.

        It is 1 if there is no such guarantee.
        """
        products, plans = self.target.products, self.target.layer_plans
        by_products = getattr(self.backend, "row_invariant", False) and all(map(products.is_row_invariant, plans))
        by_layers = all(getattr(layer, "row_invariant", False) for layer in self.target.layers)
        return products.invariant_rows if by_products or by_layers else 1

    @property
    def prompt_rounding(self) -> PromptRounding:
        """Return how prompt rows are computed. If verify rows are invariant, prompt rows round the same in every
        pack."""
        return self.target.products.prompt_rounding if self.row_invariant else NO_ROUNDING

    @property
    def of_drafters(self) -> DrafterBuild:
        """Return the parts that a drafter is made from."""
        shared = self.target, self.backend, self.kernels, self.device, self.dtype, self.experts_read
        return DrafterBuild(*shared, self.warnings)


def resolve_device(name: str) -> torch.device:
    """Return the device for `device=`; `auto` is CUDA if torch has it, else the CPU.

    Raises:
        UserError: torch sees no GPU, or cannot use it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and has_cuda():
            raise UserError("device=auto: there is a GPU, but this torch cannot use it; use device=cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device={name}: this torch sees no CUDA device; use device=cpu")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the type that `dtype=` names; `auto` is float32 on a CPU, else bfloat16.

    Raises:
        UserError: float16 on a CPU.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name == "float16" and device.type == "cpu":
        raise UserError("dtype=float16 is for a GPU, but this run is on the CPU; use dtype=float32 or device=cuda")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def load_models(
    chosen: Chosen,
    max_seq_len: int,
    markers: ThinkingMarkers | None = None,
    partition: Partition = WHOLE,
    behind: int = POSITIONS_BEHIND,
) -> TargetBuild:
    """Load the part of the target that `partition` keeps.

    The rotary tables extend `behind` positions past the longest sequence, or more if the chosen drafter needs it, but
    not past the target's last position.

    Raises:
        UserError: the checkpoint is wrong, has too few positions for `max_seq_len`, cannot be split, or needs what the
            run's tree, attention or device lacks.
    """
    config, folder = chosen.config, chosen.target_folder
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if device.type == "cuda":
        # cuDNN plans its attention for every new shape, and a growing cache has one in every round.
        torch.backends.cuda.enable_cudnn_sdp(False)
    model_config = read_model_config(folder)
    _refuse_target(chosen, model_config, max_seq_len)
    # Positions past the table's last row are clamped to it. A table reaches past the length before a scaling only if
    # sequences do, since its frequencies depend on that (`models.rope`).
    behind = max(behind, rows_behind(chosen, config.drafter.num_draft_tokens))
    ropes = (plan.rope for plan in model_config.layers if plan.rope.scaling in ("dynamic", "longrope"))
    ends = {rope.original_max_position_embeddings for rope in ropes} | {model_config.max_position_embeddings}
    max_positions = min(end for end in (*ends, max_seq_len + behind) if end >= max_seq_len)
    kernels = KERNELS[config.kernels](device, dtype, config.row_invariant)
    context = BackendContext(
        config.cache.page_size, max_positions, device, dtype, kernels.rope_write, kernels.torch_attention
    )
    backend = _make_backend(chosen, model_config, context)
    checkpoint = None if config.target.weights == Weights.random else folder
    kept_in = KEPT_IN[config.target.weight_dtype]
    source = WeightSource(checkpoint, dtype, device, partition, config.seed, kept_in)
    products = kernels.products if partition is WHOLE else PLAIN
    target = load_target(model_config, source, backend, max_positions, products)
    build = TargetBuild(target, backend, kernels, device, dtype, ExpertsRead(device, config.batch_size), markers)
    build.of_drafters.adopt(target.expert_parts)
    for net in target.delta_nets:
        net.use(kernels.delta.steps)
    return build


def _refuse_target(chosen: Chosen, target: ModelConfig, max_seq_len: int) -> None:
    """Refuse a target with too few positions for the cache, or one with states if the run has a tree."""
    if max_seq_len > target.max_position_embeddings:
        raise UserError(
            f"cache.max_seq_len={max_seq_len} is longer than the target's {target.max_position_embeddings} "
            "positions; use cache.max_seq_len=null"
        )
    if target.keeps_states and chosen.sizes is not None:
        raise UserError(
            f"tree={chosen.tree.name}: layers of the target keep a state, which branches cannot share "
            f"({chosen.target_folder}); use tree=none"
        )


def _make_backend(chosen: Chosen, target: ModelConfig, context: BackendContext) -> AttentionBackend:
    """Make the attention backend, before any weight is read; UserError if it lacks latent attention that the target
    has."""
    attention = chosen.attention
    make = attention.make if chosen.sizes is None else attention.make_for_trees
    assert make is not None, "a tree with a backend for chains is refused earlier"
    backend = made(make(context), attention, "make" if chosen.sizes is None else "make_for_trees")
    if any(plan.latent is not None for plan in target.layers) and backend.latent is None:
        raise UserError(
            f"attention={attention.name} has no latent attention (MLA), which the target needs; use attention=torch"
        )
    if backend.latent is not None:
        backend.latent.expect(chosen.config.batch_size)
    return backend
