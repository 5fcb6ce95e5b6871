"""Reads a config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def present(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys whose value is not null, which counts as absent in config.json."""
    return {key: value for key, value in keys.items() if value is not None}
