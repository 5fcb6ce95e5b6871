"""Tensors of a checkpoint that are read on access."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch


class LazyTensors(Mapping[str, torch.Tensor]):
    """Reads a tensor on every access and keeps none. So weights are in memory only once while a model converts their
    layout."""

    def __init__(self, names: Collection[str], read: Callable[[str], torch.Tensor]) -> None:
        self._names = dict.fromkeys(names)
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
