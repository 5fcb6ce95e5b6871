"""Chooses options for the knobs set to auto (`attention`, `kernels`, `graph`) when a run is composed.

On a CUDA device it tries the fast option of each knob, as if the user had typed it. If that adds a refusal, or needs
Triton where there is none, the option that runs anywhere is kept. On a CPU only `kernels` has a fast option. It is
taken if it adds no refusal, supports all of the target's layers, and can be compiled on this machine. All later code
sees the chosen options, and `RunConfig.auto` records which of them were chosen here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from spec_lab.core.errors import KERNELS, NO_KERNELS, UserError
from spec_lab.menu import registry
from spec_lab.menu.choices import KernelsChoice, RelaxedPhase
from spec_lab.menu.chosen import Chosen, choose
from spec_lab.menu.config import AttentionConfig, CacheConfig, RunConfig
from spec_lab.menu.devices import runs_on_cuda
from spec_lab.menu.option import GraphOption
from spec_lab.menu.refusals.run import problems
from spec_lab.menu.refusals.weights import model_of
from spec_lab.operators.promises import native_takes

AUTO = "auto"
CPU_PREFILL_TOKENS, CUDA_PREFILL_TOKENS = 2048, 8192
"""More rows per forward gain little on either device: docs/log/prompt_passes.md. vLLM's server uses 8192 on an H100."""
NATIVE_PREFILL_TOKENS = 1
"""A single prompt runs its layers in C, but packed prompts do not: docs/log/cpu.md."""
SHORT_CHUNK, LONG_CHUNK = 512, 8192
"""The long one is for attention without masks. A mask takes the size of the chunk times the number of all keys before
it."""


@dataclass(frozen=True, slots=True)
class AutoKnob:
    """A knob that may be auto.

    Attributes:
        name_of: returns a run's option.
        take: returns the run with another option.
        fast: the option that is taken on a CUDA device unless something refuses it.
        fast_on_cpu: the option that is taken on a CPU if the run and the machine support it; None if there is no
            faster one.
        needs_triton: whether the option `fast` needs Triton.
    """

    name_of: Callable[[RunConfig], str]
    take: Callable[[RunConfig, str], RunConfig]
    fast: str
    needs_triton: bool
    fast_on_cpu: str | None = None


RUNS_ANYWHERE = {"attention": "torch", "kernels": "torch", "graph": "eager"}
"""The option of each knob that suits every run."""


def _take_attention(config: RunConfig, name: str) -> RunConfig:
    return dataclasses.replace(config, attention=AttentionConfig(name=name))


def _take_kernels(config: RunConfig, name: str) -> RunConfig:
    return dataclasses.replace(config, kernels=KernelsChoice(name))


def _take_graph(config: RunConfig, name: str) -> RunConfig:
    return dataclasses.replace(config, graph=registry.load(config.extensions).find(GraphOption, name).schema())


KNOBS: Mapping[str, AutoKnob] = {
    "attention": AutoKnob(lambda config: config.attention.name, _take_attention, "triton", True),
    "kernels": AutoKnob(lambda config: str(config.kernels), _take_kernels, "triton", True, "native"),
    "graph": AutoKnob(lambda config: config.graph.name, _take_graph, "round", False),
}


def with_auto_chosen(config: RunConfig) -> RunConfig:
    """Return the run with an option in place of each auto, and a number in place of each null in `cache.prefill_*`.

    Raises:
        UserError: the user set `auto`, which only records the choices made here.
    """
    if config.auto:
        raise UserError("auto=[...] is written by the lab into its record; leave it out")
    on_cuda = runs_on_cuda(config.device)
    open_knobs = {name: knob for name, knob in KNOBS.items() if knob.name_of(config) == AUTO}
    for name, knob in open_knobs.items():
        config = knob.take(config, RUNS_ANYWHERE[name])
    chosen = _chosen(config)
    if chosen is not None:
        for knob in open_knobs.values():
            chosen = _faster(chosen, knob) if on_cuda else _faster_on_cpu(chosen, knob)
        config = chosen.config
    return dataclasses.replace(config, auto=sorted(open_knobs), cache=_with_prompt_sizes(config, on_cuda))


def _chosen(config: RunConfig) -> Chosen | None:
    """Resolve a run; None if it cannot be resolved, which is refused later."""
    try:
        return choose(config)
    except UserError:
        return None


def _with_prompt_sizes(config: RunConfig, on_cuda: bool) -> CacheConfig:
    """Return the cache config with numbers for those sizes of prompt forwards that were not set."""
    cache = config.cache
    if cache.prefill_chunk is None:
        # With this phase the result depends on a prompt's last chunk, whose size must not depend on the device.
        reads_chunks = getattr(config.acceptance, "phase", None) == RelaxedPhase.round
        is_long = on_cuda and config.attention.name == KNOBS["attention"].fast and not reads_chunks
        chunk = LONG_CHUNK if is_long else SHORT_CHUNK
        if cache.prefill_tokens is not None and cache.prefill_tokens > 1:
            chunk = min(chunk, cache.prefill_tokens)
        cache = dataclasses.replace(cache, prefill_chunk=chunk)
    if cache.prefill_tokens is None:
        of_cpu = NATIVE_PREFILL_TOKENS if config.kernels == KernelsChoice.native else CPU_PREFILL_TOKENS
        tokens = CUDA_PREFILL_TOKENS if on_cuda else of_cpu
        cache = dataclasses.replace(cache, prefill_tokens=max(tokens, cache.chunk_size) if tokens > 1 else tokens)
    return cache


def _faster(chosen: Chosen, knob: AutoKnob) -> Chosen:
    """Return the run with the knob's fast option, or unchanged if that adds a refusal or cannot compile Triton."""
    if knob.needs_triton and (find_spec("triton") is None or os.environ.get("TRITON_INTERPRET")):
        return chosen
    faster = chosen.again(knob.take(chosen.config, knob.fast))
    return faster if set(problems(faster)) <= set(problems(chosen)) else chosen


def _faster_on_cpu(chosen: Chosen, knob: AutoKnob) -> Chosen:
    """Return the run with the option that is fast on a CPU, if the run can take it and it can be compiled here."""
    if knob.fast_on_cpu is None:
        return chosen
    faster = chosen.again(knob.take(chosen.config, knob.fast_on_cpu))
    return faster if _takes_native(faster, chosen) and problem_of_native() is None else chosen


def _takes_native(native: Chosen, chosen: Chosen) -> bool:
    """Return whether kernels in C cause no refusals that the run would not have without them, and support the
    target."""
    return _against_native(native, chosen) is None


def _against_native(native: Chosen, chosen: Chosen) -> str | None:
    """Return why the run cannot take kernels in C: a refusal that it has only with them, or its target's layers.

    None if it can.
    """
    before = set(problems(chosen))
    refused = next((problem for problem in problems(native) if problem not in before), None)
    if refused is not None:
        return refused.partition(";")[0]
    model = model_of(chosen)
    if model is not None and model.gemma4 is None and all(map(native_takes, model.layers)):
        return None
    return "not all of the target's layers are plain attention and MLPs of whole vectors"


def problem_of_native() -> str | None:
    """Return what is missing to compile `spec_kernels.native`; None if nothing is."""
    if find_spec(KERNELS) is None:
        return NO_KERNELS
    from spec_kernels.native import build

    return build.problem()


def why_kernels(chosen: Chosen) -> str:
    """Return a line that says which kernels were chosen for a CPU and their threads; for torch also why not native.

    It is for targets whose option sets no number of threads.
    """
    config = chosen.config
    named = None if config.num_threads is None else f"num_threads={config.num_threads}"
    if config.kernels == KernelsChoice.native:
        alone = "one thread; num_threads=N uses N, each on its own core"
        return f"kernels=native on {named or alone}"
    native = chosen.again(_take_kernels(config, KernelsChoice.native))
    against = _against_native(native, chosen) or problem_of_native()
    return f"kernels=torch on {named or 'all threads'}, not kernels=native: {against}"
