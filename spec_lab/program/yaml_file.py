"""Reads a YAML file, with its defects as errors of one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from spec_lab.core.errors import UserError, one_line
from spec_lab.core.regular import regular_text


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that is written twice, which PyYAML's loader accepts, and `{values: 1, 2}`, in which 2 is a key.

    Keys are compared as written, so that `true` beside `yes` is not refused.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._checked: set[int] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Check the keys, and then merge those of other mappings into the node.

        A node may come twice: PyYAML also flattens one that another merges. It is checked only as it was written.
        """
        if id(node) not in self._checked:
            self._checked.add(id(node))
            _check_keys(node)
        super().flatten_mapping(node)


def _check_keys(node: yaml.MappingNode) -> None:
    keys = [(key.tag, key.value) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"the key {key[1]} occurs twice in the object of line {node.start_mark.line + 1}")
    for written, value in node.value:
        if node.flow_style and _is_nothing(value):
            name = written.value if isinstance(written, yaml.ScalarNode) else f"of line {written.start_mark.line + 1}"
            raise ValueError(f"the key {name} has no value; write one, or a list in brackets, such as [1, 2]")


def _is_nothing(node: yaml.Node) -> bool:
    """Return whether the value is missing; YAML reads it as null."""
    return node.tag == "tag:yaml.org,2002:null" and node.value == ""


def read_yaml(path: Path) -> Any:
    """Return the contents of the file, in YAML's plain types.

    Raises:
        UserError: the file is not UTF-8 or not YAML, has a key twice, has a key without a value in braces or brackets,
            or has a value that does not fit its tag, as in `!!int x`.
        OSError: the file cannot be read.
    """
    try:
        return yaml.load(regular_text(path), _Loader)
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError, LookupError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); correct it") from error
