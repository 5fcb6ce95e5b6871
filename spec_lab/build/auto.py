"""Decides what a run leaves open: `attention`, `kernels` and `graph` if they are auto, and sizes of prompt forwards.

It comes after the target's config is read and before its weights are. On a CUDA device the fast option of each knob is
taken unless something speaks against it. On a CPU only `kernels` has one: C, where it supports every layer and can be
compiled. The folder of a run is named by what was typed; the record says what was taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from spec_lab.build.models import resolve_device
from spec_lab.checkpoints.families import read_model_config
from spec_lab.config.checks import problems
from spec_lab.config.choices import KernelsChoice, RelaxedPhase
from spec_lab.config.option import get
from spec_lab.config.run import CacheConfig, Run
from spec_lab.operators.promises import NATIVE_ROWS, native_takes

CPU_PREFILL_TOKENS, CUDA_PREFILL_TOKENS = 2048, 8192
"""More rows per forward gain little on either device: docs/log/prompt_passes.md. vLLM's server uses 8192 on an H100."""
NATIVE_PREFILL_TOKENS = 1
"""A single prompt runs its layers in C, but packed prompts do not: docs/log/cpu.md."""
SHORT_CHUNK, LONG_CHUNK = 512, 8192
"""The long one is for attention without masks. A mask takes the size of the chunk times the number of all keys before
it."""


def with_auto_chosen(run: Run) -> Run:
    """Return the run with an option in place of each auto, a number in place of each null in `cache.prefill_*`, and
    true or false in place of null in `graph.prompts`."""
    on_cuda = resolve_device(run.device).type == "cuda"
    has_triton = on_cuda and find_spec("triton") is not None and not os.environ.get("TRITON_INTERPRET")
    if run.attention.name == "auto":
        run = _faster(run, "attention", get("attention", "torch")(), get("attention", "triton")(), lambda: has_triton)
    if run.kernels == KernelsChoice.auto:
        fast = KernelsChoice.triton if on_cuda else KernelsChoice.native
        run = _faster(run, "kernels", KernelsChoice.torch, fast, lambda: has_triton if on_cuda else _can_be_native(run))
    if run.graph.name == "auto":
        run = _faster(run, "graph", get("graph", "eager")(), get("graph", "round")(), lambda: on_cuda)
    graph: Any = run.graph
    if getattr(graph, "prompts", False) is None:
        can_be = on_cuda and not read_model_config(run.target.folder).keeps_states
        run = _faster(run, "graph", replace(graph, prompts=False), replace(graph, prompts=True), lambda: can_be)
    return replace(run, cache=_with_prompt_sizes(run, on_cuda))


def _faster(run: Run, knob: str, usual: Any, fast: Any, is_there: Callable[[], bool]) -> Run:
    """Return the run with the fast value of a knob if it is there, and nothing speaks against it but not against the
    usual one; else with the usual value."""
    slow, faster = (replace(run, **{knob: value}) for value in (usual, fast))
    return faster if set(problems(faster)) <= set(problems(slow)) and is_there() else slow


def _can_be_native(run: Run) -> bool:
    """Return whether C supports all layers of a run's target, can be compiled, and is the faster for its rounds."""
    target = read_model_config(run.target.folder)
    if target.gemma4 is not None or not all(map(native_takes, target.layers)):
        return False
    from spec_kernels.native import build

    num_rows = run.batch_size * (run.drafter.num_draft_tokens + 1)
    return build.problem() is None and num_rows <= NATIVE_ROWS[build.register_file()]


def _with_prompt_sizes(run: Run, on_cuda: bool) -> CacheConfig:
    """Return the cache config with numbers for those sizes of prompt forwards that were not set."""
    cache = run.cache
    # With this phase the result depends on a prompt's last chunk, whose size must not depend on the device.
    reads_chunks = getattr(run.acceptance, "phase", None) == RelaxedPhase.round
    is_long = on_cuda and run.attention.name == "triton" and not reads_chunks
    of_cpu = NATIVE_PREFILL_TOKENS if run.kernels == KernelsChoice.native else CPU_PREFILL_TOKENS
    return replace(
        cache,
        prefill_chunk=cache.prefill_chunk or (LONG_CHUNK if is_long else SHORT_CHUNK),
        prefill_tokens=cache.prefill_tokens or (CUDA_PREFILL_TOKENS if on_cuda else of_cpu),
    )
