"""Functions that are imported when they are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class Deferred:
    """A function given by its module and name. Calling it imports the module, which may need torch."""

    module: str
    name: str

    def resolve(self) -> Callable[..., Any]:
        """Import the function and return it."""
        function: Callable[..., Any] = getattr(import_module(self.module), self.name)
        return function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.resolve()(*arguments, **named)
