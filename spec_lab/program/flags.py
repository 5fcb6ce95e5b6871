"""The flags of the command line: Hydra's, and `--dry-run`.

Hydra does not accept flags between overrides (`batch_size=1,8 -m drafter=eagle3`), so they are moved to the front.
"""

from __future__ import annotations

from collections.abc import Sequence

from spec_lab.core.errors import UserError
from spec_lab.menu.nearest import hint, nearest
from spec_lab.program.unsafe import refuse_argument

DRY_RUN_FLAG = "--dry-run"
FLAGS = (
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),
    *("--shell-completion", "-sc", DRY_RUN_FLAG),
)
FLAGS_WITH_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
)
FLAGS_WITH_OPTIONAL_VALUE = ("--info", "-i")
INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
CONFIGS = ("job", "hydra", "all")
VALUES = {"--cfg": CONFIGS, "-c": CONFIGS, "--info": INFO_TOPICS, "-i": INFO_TOPICS}
FLAGS_THAT_ADD_OPTIONS = ("--config-path", "-cp", "--config-dir", "-cd")
FLAGS_THAT_SHOW = (
    *("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"),
)
"""Flags that only show something, so that nothing runs."""
OF_CFG = ("--package", "-p")
"""Flags that Hydra reads when it prints a configuration, and silently ignores otherwise."""


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return flags with their values, each a list item, and the overrides.

    Raises:
        UserError: a flag does not exist, has no value or a wrong one, or is not read; or `refuse_argument` refuses an
            argument.
    """
    flags: list[str] = []
    overrides: list[str] = []
    pending = list(reversed(arguments))
    while pending:
        argument = pending.pop()
        refuse_argument(argument)
        if argument.startswith("-"):
            flags += _take_flag(argument, pending)
        else:
            overrides.append(argument)
    of_cfg = next((flag for flag in OF_CFG if flag in flags), None)
    if of_cfg is not None and not {"--cfg", "-c"} & set(flags):
        raise UserError(f"{of_cfg} is read only with --cfg; add --cfg job, or leave it out")
    return flags, overrides


def _take_flag(argument: str, pending: list[str]) -> list[str]:
    """Return the flag in `argument`, and its value if it takes one.

    A value that is an argument of its own is removed from the end of `pending`.
    """
    flag, has_value, value = argument.partition("=")
    known = (*FLAGS, *FLAGS_WITH_VALUE, *FLAGS_WITH_OPTIONAL_VALUE)
    if flag not in known:
        raise UserError(f"{flag}: there is no such flag{hint(nearest(flag, known))}")
    if flag in FLAGS:
        if has_value:
            raise UserError(f"{argument}: {flag} takes no value; leave it out")
        return [flag]
    if not has_value:
        if flag in FLAGS_WITH_OPTIONAL_VALUE:
            value = pending.pop() if pending and pending[-1] in INFO_TOPICS else "all"
        elif pending and not pending[-1].startswith("-"):
            value = pending.pop()
        else:
            raise UserError(f"{flag} needs a value after it")
    if value not in VALUES.get(flag, (value,)):
        raise UserError(f"{flag} {value}: no such value; use one of {', '.join(VALUES[flag])}")
    return [flag, value]
