"""Helpers that find every tensor an engine's parts hold, by walking through their attributes.

A test can so look at all state at once, without knowing the names under which a part keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

from spec_lab.core.kv_cache import NULL_PAGE
from spec_lab.engine.engine import Engine


def find_tensors(engine: Engine) -> dict[str, torch.Tensor]:
    """Return every tensor of cache, slots, rule and drafter, and a tree's parents, by the path of attributes that leads
    to it first."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name in ("cache", "slots", "rule", "drafter"):
        _walk(getattr(engine.parts, name), name, found, seen)
    _walk(getattr(engine.round.drafts, "parents", None), "drafts.parents", found, seen)  # of a tree, a row a slot
    return found


def _walk(value: Any, path: str, found: dict[str, torch.Tensor], seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:  # oneDNN's packed weights have no memory to look at
            found[path] = value
        return
    for name, part in _parts_of(value):
        _walk(part, f"{path}.{name}", found, seen)


def _parts_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what an object holds: its items, its attributes, and what a function was bound to or closed over."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(value)
    elif isinstance(value, MethodType):
        yield "self", value.__self__
        yield "function", value.__func__
    elif isinstance(value, partial):
        yield from (("function", value.func), ("arguments", value.args), ("options", value.keywords))
    elif isinstance(value, FunctionType):
        yield from ((index, cell.cell_contents) for index, cell in enumerate(value.__closure__ or ()))
    elif type(value).__module__.split(".")[0] in ("spec_lab", "spec_kernels", "tests", "torch"):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        yield from ((name, getattr(value, name)) for name in slots if hasattr(value, name))
        yield from getattr(value, "__dict__", {}).items()


def is_cache(engine: Engine, tensor: torch.Tensor) -> bool:
    """Whether a tensor is a KV cache, [..., cache slots, 2, num_kv_heads, head_dim]; every cache has the target's slot
    numbering.
    """
    return tensor.dim() >= 4 and any(tensor.shape[-4:-2] == kv.shape[-4:-2] for kv in engine.parts.cache.tensors)


def poison(engine: Engine) -> None:
    """Fill the caches of target and drafter, and the windows of hidden states, with NaN, so that a row that is read
    before it is written shows. The null page, which is read by design, and the scratch row are left out."""
    start = (NULL_PAGE + 1) * engine.parts.slots.table.page_size
    for path, tensor in find_tensors(engine).items():
        if is_cache(engine, tensor):
            tensor[..., start:, :, :, :] = float("nan")
        elif path.endswith(".window.hidden"):
            tensor[:-1] = float("nan")
