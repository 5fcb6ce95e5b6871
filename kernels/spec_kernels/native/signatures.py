"""The functions of native.c with their arguments, and the loading of a library that has them. It does not import
torch."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any


class _Array:
    """An argument of C code that is an array: a contiguous tensor of one type, or None."""

    def __init__(self, dtype: str) -> None:
        self._dtype = f"torch.{dtype}"

    def from_param(self, value: Any) -> ctypes.c_void_p | None:
        """Return the address, as `ctypes` asks of the type of an argument."""
        if value is None:
            return None
        assert str(value.dtype) == self._dtype and value.is_contiguous()
        return ctypes.c_void_p(value.data_ptr())


_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_FLOATS, _PLACES, _FLAGS = _Array("float32"), _Array("int64"), _Array("bool")
_LAYER = (*(_ADDRESS,) * 2, _FLOATS, _FLOATS)

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "native_layer": (*_LAYER, _FLOATS, _FLOATS, _PLACES, *(_NUMBER,) * 3),
    "native_layers": (_ADDRESS, _NUMBER, _ADDRESS, _FLOATS, _ADDRESS, _NUMBER, _FLOATS, _NUMBER),
    "native_draft_layer": (*_LAYER, _PLACES, _FLOATS, _PLACES, *(_NUMBER,) * 3),
    "native_norm": (_ADDRESS, _FLOATS, _FLOATS, _NUMBER, _NUMBER),
    "native_product": (_ADDRESS, _FLOATS, _FLOATS, _NUMBER),
    "native_likeliest": (_ADDRESS, _ADDRESS, _PLACES, _PLACES, _FLOATS, _NUMBER),
    "native_draft_input": (_ADDRESS, _ADDRESS, _FLOATS, _NUMBER, _FLOATS, _PLACES, _FLOATS, _NUMBER),
    "native_strict": (_PLACES, _PLACES, _FLOATS, _ADDRESS, _NUMBER, _FLAGS, _PLACES, *(_NUMBER,) * 3),
    "native_build": (*(_PLACES,) * 6, *(_NUMBER,) * 5),
    "native_catchup": (*(_PLACES,) * 4, *(_NUMBER,) * 6),
    "native_commit": (*(_PLACES,) * 6, _ADDRESS, *(_NUMBER,) * 5),
    "native_look_up": (*(_PLACES,) * 4, _ADDRESS, _PLACES, *(_NUMBER,) * 6),
    "native_draft_start": (
        *(*(_ADDRESS,) * 4, _PLACES, _ADDRESS, _PLACES, *(_FLOATS,) * 3, *(_PLACES,) * 3),
        *(_NUMBER,) * 5,
    ),
    "native_draft_steps": (
        *(*(_ADDRESS,) * 3, _PLACES, _ADDRESS, *(_PLACES,) * 4, _FLOATS, _PLACES, _FLOATS, _FLOATS),
        *(_NUMBER,) * 3,
    ),
    "native_advance": (*(_PLACES,) * 4, *(_NUMBER,) * 4),
    "native_has_tiles": (),
    "native_register_file": (),
    "native_threads": (_NUMBER,),
}


def load(path: Path) -> ctypes.CDLL:
    """Load a library. This runs its code, so its bytes must have been checked before.

    Raises:
        OSError: the system cannot load it, or it lacks a function.
    """
    library = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        try:
            getattr(library, name).argtypes = arguments
        except AttributeError as error:
            raise OSError(f"{path} has no {name}") from error
    library.native_register_file.restype = ctypes.c_char_p
    return library
