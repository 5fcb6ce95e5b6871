"""The functions that `kernels=native` replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spec_kernels.native.rounds import catchup_places, commit_rows, extend_and_look_up, strict_accept
from spec_lab.operators.kernel_set import Op

NATIVE_FUNCTIONS: Mapping[Op, Callable[..., Any]] = {
    Op.STRICT_ACCEPT: strict_accept,
    Op.CATCHUP_PLACES: catchup_places,
    Op.COMMIT_ROWS: commit_rows,
    Op.LOOK_UP: extend_and_look_up,
}
