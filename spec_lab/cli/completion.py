"""Shell completion, by Hydra: `eval "$(spec-lab -sc install=bash)"`.

Hydra completes commands that begin with a script such as `spec-lab`, but not `python -m spec_lab`.
"""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig

from spec_lab.cli.session import call_hydra
from spec_lab.core.errors import UserError
from spec_lab.menu import registry
from spec_lab.menu.nearest import hint, nearest
from spec_lab.program.compose import register_schemas, with_search_path
from spec_lab.program.options import conf_folder
from spec_lab.program.overrides import extensions_in

FLAGS = ("--shell-completion", "-sc")
COMMANDS = ("install", "uninstall", "query")
SHELLS = ("bash", "fish", "zsh")
EXAMPLE = 'eval "$(spec-lab -sc install=bash)"'


def is_asked(arguments: Sequence[str]) -> bool:
    """Return whether the arguments have the flag of the shell completion."""
    return any(flag in arguments for flag in FLAGS)


def complete(arguments: Sequence[str]) -> None:
    """Print the completions, or the script that installs or uninstalls the completion.

    Raises:
        UserError: there are other arguments than the flag, its command and `extensions=`, or no such command or shell.
    """
    extensions = [text for text in arguments if text.startswith("extensions=")]
    commands = [text for text in arguments if text not in (*FLAGS, *extensions)]
    if len(commands) != 1:
        raise UserError(f"{FLAGS[0]} takes one of {', '.join(COMMANDS)}, such as {EXAMPLE}")
    command, _, shell = commands[0].partition("=")
    for word, known in ((command, COMMANDS), (shell, SHELLS)):
        if word not in known:
            raise UserError(
                f"{commands[0]}: it takes {' or '.join(known)}{hint(nearest(word, known))}, as in {EXAMPLE}"
            )
    registered = registry.load(extensions_in(extensions))
    register_schemas(registered)
    call_hydra(_never, [FLAGS[0], *with_search_path(commands, registered)], conf_folder())


def _never(_: DictConfig) -> None:
    raise AssertionError("a completion runs no job")
