"""Decides what a run leaves open: `attention`, `kernels` and `graph` if they are auto, and sizes of prompt forwards.

It comes after the target's config is read and before its weights are. On a CUDA device the fast option of each knob is
taken unless something speaks against it. On a CPU only `kernels` has one: C, where it supports every layer and can be
compiled. The folder of a run is named by what was typed; the record says what was taken.
"""

from __future__ import annotations

import os
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
    typed = {"attention": run.attention.name, "kernels": run.kernels, "graph": run.graph.name}
    asked = [knob for knob, value in typed.items() if value == "auto"]
    for knob in asked:
        run = _take(run, knob, {"attention": "torch", "kernels": "torch", "graph": "eager"}[knob])
    has_triton = find_spec("triton") is not None and not os.environ.get("TRITON_INTERPRET")
    for knob in asked:
        if on_cuda and (knob == "graph" or has_triton):
            faster = _take(run, knob, "round" if knob == "graph" else "triton")
            run = run if _new_problems(run, faster) else faster
        elif knob == "kernels" and not on_cuda and why_not_native(run) is None:
            run = _take(run, knob, "native")
    graph: Any = run.graph
    if getattr(graph, "prompts", False) is None:
        captured, not_captured = (replace(run, graph=replace(graph, prompts=prompts)) for prompts in (True, False))
        can_be = on_cuda and not read_model_config(run.target.folder).keeps_states
        run = captured if can_be and not _new_problems(not_captured, captured) else not_captured
    return replace(run, cache=_with_prompt_sizes(run, on_cuda))


def _new_problems(run: Run, other: Run) -> list[str]:
    """Return what speaks against another run but not against this one."""
    before = set(problems(run))
    return [problem for problem in problems(other) if problem not in before]


def why_not_native(run: Run) -> str | None:
    """Return why a run on a CPU cannot take kernels=native; None if it can."""
    if refused := _new_problems(run, _take(run, "kernels", "native")):
        return refused[0].partition(";")[0]
    target = read_model_config(run.target.folder)
    if target.gemma4 is not None or not all(map(native_takes, target.layers)):
        return "not all of the target's layers are plain attention and MLPs of whole vectors"
    from spec_kernels.native import build

    if (problem := build.problem()) is not None:
        return problem
    registers, num_rows = build.register_file(), run.batch_size * (run.drafter.num_draft_tokens + 1)
    if num_rows <= NATIVE_ROWS[registers]:
        return None
    return f"with this processor's registers ({registers}) torch is faster for {num_rows} rows a round"


def _take(run: Run, knob: str, name: str) -> Run:
    taken: Any = KernelsChoice(name) if knob == "kernels" else get(knob, name)()
    return replace(run, **{knob: taken})


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
