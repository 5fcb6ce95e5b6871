"""The models and the attention backend of a run, which are loaded once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from spec_lab.acceptance.phase import ThinkingMarkers
from spec_lab.build.kernels import make_kernels
from spec_lab.build.limits import rows_behind
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.keep_narrow import problem_of_narrow
from spec_lab.config.choices import WeightDtype, Weights
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError
from spec_lab.core.file_stamps import file_stamps
from spec_lab.core.kernel_set import KernelSet
from spec_lab.core.prompts import NO_ROUNDING, PromptRounding
from spec_lab.core.tree_protocols import TreeAttentionBackend
from spec_lab.engine.experts_read import ExpertsRead
from spec_lab.models.decoder import Decoder
from spec_lab.models.partition import WHOLE, Partition
from spec_lab.models.target_loader import KEPT_IN, WeightSource, load_target

Part = TypeVar("Part")
POSITIONS_BEHIND = 2 * 64 + 1
"""Least number of positions past the longest sequence in rotary tables, if the target has so many: up to 64 drafts and
the pending token of a verify pass, then a block of up to 64 rows."""


class Last:
    """What was made last, such as the models of a run, which is freed before anything else is made."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._made: Any = None

    def once(self, key: Hashable, make: Callable[[], Part]) -> Part:
        """Return what `make` made when this was last called, if that was with `key`; else make it."""
        if self._made is None or key != self._key:
            self._made = None
            gc.collect()
            self._made, self._key = make(), key
        made: Part = self._made
        return made


@dataclass(frozen=True, slots=True)
class Models:
    """A loaded target with related parts, which all engines of a run share.

    Attributes:
        backend: of attention; it masks the rows of trees in a run that has one.
        kernels: the run's kernels.
        experts_read: counters for the layers with experts, of the target and the drafter.
        markers: markers of the thinking phase; None if none are given.
        warnings: what the record must say of this run, in sentences; `build` of an option may add to it.
        heads: the head that engines share, which belongs to this backend.
    """

    target: Decoder
    backend: TreeAttentionBackend
    kernels: KernelSet
    device: torch.device
    dtype: torch.dtype
    experts_read: ExpertsRead
    markers: ThinkingMarkers | None = None
    warnings: list[str] = field(default_factory=list)
    heads: Last = field(default_factory=Last)

    @property
    def invariant_rows(self) -> int:
        """Return the largest number of rows in a target forward for which each row is bit for bit as if it were alone.

        It is 1 if there is no such guarantee.
        """
        kernels, plans = self.target.kernels, self.target.layer_plans
        by_plans = getattr(self.backend, "row_invariant", False) and all(map(kernels.is_row_invariant, plans))
        by_layers = all(getattr(layer, "row_invariant", False) for layer in self.target.layers)
        return kernels.invariant_rows if by_plans or by_layers else 1

    @property
    def prompt_rounding(self) -> PromptRounding:
        """Return how prompt rows are computed. If verify rows are invariant, prompt rows round the same in every
        pack."""
        return self.target.kernels.prompt_rounding if self.invariant_rows > 1 else NO_ROUNDING

    def beside_target(self, model: Callable[..., Part], config: object, tensors: Mapping[str, torch.Tensor]) -> Part:
        """Make a model from its checkpoint's tensors, with the target's embedding, head and number of positions."""
        target = self.target
        return model(
            config,
            tensors,
            embedding=target.embedding,
            target_head=target.head_weight,
            backend=self.backend,
            max_positions=target.num_positions,
            kernels=self.kernels,
        )


def resolve_device(name: str) -> torch.device:
    """Return the device for `device=`; `auto` is CUDA if torch has it, else the CPU."""
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(usual if name == "auto" else name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the type that `dtype=` names; `auto` is float32 on a CPU, else bfloat16."""
    usual = "float32" if device.type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, usual if name == "auto" else name)
    return dtype


def load_models(
    run: Run,
    max_seq_len: int,
    markers: ThinkingMarkers | None = None,
    partition: Partition = WHOLE,
    last: Last | None = None,
) -> Models:
    """Load the part of the target that `partition` keeps, unless `last` has the same from the run before.

    So jobs in a row that use the same files read them once. Others are read when these are freed.

    Raises:
        UserError: the checkpoint is wrong, cannot be split, or needs what the run's tree, attention or device lacks.
    """
    key = (
        run.seed if run.target.weights == Weights.random else None,
        *(repr(run.target), file_stamps([run.target.folder]), repr(run.attention)),
        *(run.kernels, run.device, run.dtype, run.row_invariant),
        *(run.cache.page_size, run.sizes is None, max_seq_len, _behind(run), partition),
    )
    models = (last or Last()).once(key, lambda: _load(run, max_seq_len, partition))
    models.target.num_tokens = models.target.vocab_size  # a draft model lowers it to the ids that it has
    return replace(models, markers=markers, warnings=[])


def _load(run: Run, max_seq_len: int, partition: Partition) -> Models:
    """Load models. The rotary tables extend past the longest sequence, but not past the target's last position."""
    device = resolve_device(run.device)
    dtype = resolve_dtype(run.dtype, device)
    if device.type == "cuda":
        # cuDNN plans its attention for every new shape, and a growing cache has one in every round.
        torch.backends.cuda.enable_cudnn_sdp(False)
    model_config = read_model_config(run.target.folder)
    _refuse_target(run, model_config)
    # Positions past the table's last row are clamped to it. A table reaches past the length before a scaling only if
    # sequences do, since its frequencies depend on that (`models.rope`).
    ropes = (plan.rope for plan in model_config.layers if plan.rope.scaling in ("dynamic", "longrope"))
    ends = {rope.original_max_position_embeddings for rope in ropes} | {model_config.max_position_embeddings}
    max_positions = min(end for end in (*ends, max_seq_len + _behind(run)) if end >= max_seq_len)
    experts_read = ExpertsRead(device)
    made = make_kernels(run.kernels, device, dtype, run.row_invariant)
    kernels = replace(made, watch_experts=experts_read.watch)
    backend: Any = run.attention.build(run, kernels, max_positions)
    checkpoint = None if run.target.weights == Weights.random else run.target.folder
    kept_in = KEPT_IN.get(run.target.weight_dtype)
    source = WeightSource(checkpoint, dtype, device=device, partition=partition, seed=run.seed, kept_in=kept_in)
    own = kernels if partition is WHOLE else kernels.without_parts()
    target = load_target(model_config, source, backend, max_positions, own)
    return Models(target, backend, kernels=kernels, device=device, dtype=dtype, experts_read=experts_read)


def _behind(run: Run) -> int:
    return max(POSITIONS_BEHIND, rows_behind(run))


def _refuse_target(run: Run, target: ModelConfig) -> None:
    """Refuse states where the run has a tree, and layers that cannot be narrow."""
    if target.keeps_states and run.sizes is not None:
        raise UserError(
            f"tree={run.tree.name}: layers of the target keep a state, which branches cannot share "
            f"({run.target.folder}); use tree=none"
        )
    narrow = run.target.weight_dtype
    kind = problem_of_narrow(target, KEPT_IN.get(narrow))
    if narrow != WeightDtype.auto and kind is not None:
        raise UserError(f"target.weight_dtype={narrow}: the target has {kind}; use target.weight_dtype=auto")
