"""`python -m spec_lab.train`: trains a drafter for the shipped target, or a new target and a drafter for it.

Exit codes are those of `python -m spec_lab`: 0 finished, 1 failed, 2 refused, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from spec_lab.cli.ending import guarded, print_trouble
from spec_lab.cli.options import Menu
from spec_lab.train.menu import READ_FOR, parts_of, train_folder, train_menu

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from spec_lab.record.schema import Status
    from spec_lab.train.pipeline import Pipeline

INTRODUCTION = """\
spec_lab.train: trains a drafter for the shipped target, or a new target and a drafter for it, and writes their cards.

  python -m spec_lab.train drafter=mtp_eagle
  python -m spec_lab.train target=pocket drafter=eagle3
  python -m spec_lab.train debug=smoke
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what `arguments` (default: those of the process) say and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return guarded(lambda: _run(arguments), train_menu(), "interrupted; the same command goes on from here")


def _run(arguments: Sequence[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        from spec_lab.cli.help import describe_menu

        print(f"{INTRODUCTION}\n{describe_menu(train_menu())}")
        return 0
    if "--version" in arguments:
        from spec_lab.cli.help import version_text

        print(version_text())
        return 0
    from spec_lab.cli.job import worst_exit_code
    from spec_lab.cli.overrides import check_arguments
    from spec_lab.cli.session import call_hydra

    statuses: list[Status] = []
    checked = check_arguments(arguments, train_menu())
    call_hydra(lambda composed: statuses.append(_train(composed)), checked, train_folder())
    return worst_exit_code(statuses)


def _train(composed: DictConfig) -> Status:
    """Hydra's task: one composed training. Errors become a status, so that a multirun goes on."""
    from hydra.core.hydra_config import HydraConfig

    try:
        refuse_unread(HydraConfig.get().overrides.task, composed)
        pipeline_of(composed).run()
    except Exception as error:
        return print_trouble(error, train_menu())
    return "finished"


def refuse_unread(overrides: Iterable[str], composed: DictConfig) -> None:
    """Refuses settings of stages that these options leave out.

    Raises:
        UserError: `corpus.row_length=256` beside target=shipped, or `generations...` beside drafter=none.
    """
    from spec_lab.errors import UserError

    for override in overrides:
        key = override.partition("=")[0]
        group = READ_FOR.get(key.partition(".")[0])
        if group is not None and composed[group] is None:
            options = "|".join(parts_of(train_menu().groups[group]))
            raise UserError(f"{key} is not read by the options chosen; leave it out or choose {group}={options}")


def pipeline_of(composed: DictConfig) -> Pipeline:
    """The pipeline that a composed configuration describes.

    Raises:
        UserError: its parts do not fit together, or a key belongs to an option that was not chosen.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    from spec_lab.errors import UserError

    _refuse_stray_keys(composed, train_menu())
    try:
        pipeline: Pipeline = instantiate(composed, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from error
        raise
    return pipeline


def _refuse_stray_keys(composed: DictConfig, menu: Menu) -> None:
    """`target.hidden_size=64` beside target=shipped makes Hydra invent a target that is nothing but this key."""
    from spec_lab.cli.compose import not_read
    from spec_lab.errors import UserError

    for group in ("drafter", "target"):
        part = composed[group]
        if part is not None and "_target_" not in part:
            stray = next(name for name in menu.keys if name.startswith(f"{group}.{next(iter(part))}"))
            raise UserError(not_read(stray, menu))


if __name__ == "__main__":
    sys.exit(main())
