"""Reads a YAML file, with its defects as errors of one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from spec_lab.core.errors import UserError, one_line
from spec_lab.core.regular import regular_text


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses duplicate keys, which PyYAML's own loader accepts, and `{values: 1, 2}`, in which 2 is a key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"the key {key} occurs twice in the object of line {node.start_mark.line + 1}")
        bare = [key.value for key, value in node.value if node.flow_style and _is_nothing(value)]
        if bare:
            raise ValueError(f"{bare[0]} is alone in braces; write a list in brackets, such as [1, 2]")
        return super().construct_mapping(node, deep)


def _is_nothing(node: yaml.Node) -> bool:
    """Return whether the value is missing; YAML reads it as null."""
    return node.tag == "tag:yaml.org,2002:null" and node.value == ""


def read_yaml(path: Path) -> Any:
    """Return the contents of the file, in YAML's plain types.

    Raises:
        UserError: the file is not UTF-8 or not YAML, has a duplicate key, has a key alone in braces, or has a value
            that does not fit its tag, as in `!!int x`.
        OSError: the file cannot be read.
    """
    try:
        return yaml.load(regular_text(path), _Loader)
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError, LookupError, AttributeError) as error:
        raise UserError(f"{path}: not YAML ({one_line(error)}); correct it") from error
