"""Finds the cells of a sweep's grid that `leave_out` lists, such as those that are known not to work.

This is needed because Hydra's grids are full products.
"""

from __future__ import annotations

from collections.abc import Mapping

from omegaconf import DictConfig, OmegaConf

from spec_lab.core.errors import UserError
from spec_lab.program.options import run_menu
from spec_lab.program.overrides import check_overrides


def cell_left_out(composed: DictConfig, choices: Mapping[str, str | None]) -> str | None:
    """Return the entry of `leave_out` that a composed job of a sweep matches; None if the job is to run.

    Args:
        choices: the option of each group.

    Raises:
        UserError: `check_overrides` refuses an entry, since a key, an option or a value does not exist.
    """
    return next((cell for cell in composed.leave_out if _is_cell(cell, composed, choices)), None)


def _is_cell(cell: str, composed: DictConfig, choices: Mapping[str, str | None]) -> bool:
    conditions = cell.split()
    try:
        check_overrides(conditions, menu=run_menu(tuple(composed.extensions)))
    except UserError as error:
        raise UserError(f"leave_out, '{cell}': {error}") from error
    return all(_value(text.partition("=")[0], composed, choices) == text.partition("=")[2] for text in conditions)


def _value(key: str, composed: DictConfig, choices: Mapping[str, str | None]) -> str:
    return str(choices[key] if key in choices else OmegaConf.select(composed, key))
