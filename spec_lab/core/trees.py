"""Finds, maps and copies the tensors within nested containers. Mapping and copying enter dataclasses too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

Tree = TypeVar("Tree")


def map_tensors(tree: Tree, function: Callable[[torch.Tensor], torch.Tensor]) -> Tree:
    """Return a copy of nested dataclasses, tuples, lists and dicts with `function` applied to every tensor. Other
    leaves are kept."""
    if isinstance(tree, torch.Tensor):
        return function(tree)  # type: ignore[return-value]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changes = {part.name: map_tensors(getattr(tree, part.name), function) for part in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **changes)
    if isinstance(tree, dict):
        return {key: map_tensors(value, function) for key, value in tree.items()}  # type: ignore[return-value]
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(item, function) for item in tree)
    return tree


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an operator's arguments or results, in order, also from nested lists, tuples and dicts."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def copy_tensors(into: Any, source: Any) -> None:
    """Copy every tensor of `source` to its counterpart in `into`. All other leaves must be equal.

    A tensor that is the same object in both is skipped.
    """
    if isinstance(source, torch.Tensor):
        if into is not source:
            assert into.shape == source.shape, f"a buffer of {tuple(into.shape)} cannot take {tuple(source.shape)}"
            into.copy_(source)
    elif dataclasses.is_dataclass(source) and not isinstance(source, type):
        for part in dataclasses.fields(source):
            copy_tensors(getattr(into, part.name), getattr(source, part.name))
    elif isinstance(source, dict):
        assert into.keys() == source.keys()
        for key, value in source.items():
            copy_tensors(into[key], value)
    elif isinstance(source, tuple | list):
        for mine, theirs in zip(into, source, strict=True):
            copy_tensors(mine, theirs)
    else:
        assert into == source, f"{into!r} was frozen, and now it is {source!r}"
