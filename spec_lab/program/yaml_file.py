"""Reads a YAML file that somebody else wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from spec_lab.core.errors import UserError, one_line
from spec_lab.core.regular import regular_text


def read_yaml(path: Path) -> Any:
    """Return what the file holds, of YAML's plain types.

    Raises:
        UserError: it is no UTF-8, no YAML, or names a type for what is none of it, as `!!int x`.
        OSError: it cannot be read.
    """
    try:
        return yaml.safe_load(regular_text(path))
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError, LookupError, AttributeError) as error:
        raise UserError(f"{path}: not YAML ({one_line(error)}); mend it") from error
