"""The functions of native.c with their arguments, and the loading of a library that has them. It does not import
torch."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "native_layer": (*(_POINTER,) * 7, *(_NUMBER,) * 3),
    "native_layers": (_POINTER, _NUMBER, _POINTER, _POINTER, _POINTER, _NUMBER, _POINTER, _NUMBER),
    "native_draft_layer": (*(_POINTER,) * 7, *(_NUMBER,) * 3),
    "native_norm": (*(_POINTER,) * 3, _NUMBER, _NUMBER),
    "native_product": (*(_POINTER,) * 3, _NUMBER),
    "native_likeliest": (*(_POINTER,) * 5, _NUMBER),
    "native_draft_input": (*(_POINTER,) * 3, _NUMBER, *(_POINTER,) * 3, _NUMBER),
    "native_strict": (*(_POINTER,) * 4, _NUMBER, _POINTER, _POINTER, *(_NUMBER,) * 3),
    "native_build": (*(_POINTER,) * 6, *(_NUMBER,) * 5),
    "native_catchup": (*(_POINTER,) * 4, *(_NUMBER,) * 6),
    "native_commit": (*(_POINTER,) * 7, *(_NUMBER,) * 5),
    "native_look_up": (*(_POINTER,) * 6, *(_NUMBER,) * 6),
    "native_draft_start": (*(_POINTER,) * 13, *(_NUMBER,) * 5),
    "native_draft_steps": (*(_POINTER,) * 13, *(_NUMBER,) * 3),
    "native_advance": (*(_POINTER,) * 4, *(_NUMBER,) * 4),
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
