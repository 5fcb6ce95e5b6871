"""A stand-in for the package reasoning_gym, which makes one kind of question."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put it where the package would be."""
    package, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    package.__spec__ = ModuleSpec("reasoning_gym", None)
    factory.DATASETS = {"chain_sum": None}  # type: ignore[attr-defined]

    def create_dataset(name: str, size: int, seed: int) -> list[dict[str, Any]]:
        return [{"question": f"{seed} + {number}?", "answer": seed + number} for number in range(size)]

    package.create_dataset = create_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
