"""Completes options and keys in a shell: `eval "$(spec-lab --shell-completion)"`, in bash and zsh.

Hydra's own completion looks for its decorator in the file of a script, and `spec-lab` has none in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from spec_lab.cli.flags import DRY_RUN_FLAG
from spec_lab.cli.options import Menu, run_menu
from spec_lab.cli.overrides import extensions_in

FLAG = "--shell-completion"
FLAGS = ("--multirun", DRY_RUN_FLAG, "--cfg", "--help", "--version", "--config-dir", FLAG)
SCRIPT = f"""\
if [ -n "$ZSH_VERSION" ]; then autoload -U +X bashcompinit && bashcompinit; fi
_spec_lab() {{
  local IFS=$'\\n'
  COMPREPLY=($(spec-lab {FLAG} "${{COMP_LINE:0:COMP_POINT}}" 2>/dev/null))
}}
complete -o nospace -F _spec_lab spec-lab
"""


def completion(arguments: Sequence[str]) -> str:
    """Return the script for a shell, or, of the line behind the flag, what its last word may become."""
    typed = " ".join(word for word in arguments if word not in (FLAG, "-sc"))
    return "\n".join(candidates(typed)) if typed else SCRIPT.rstrip()


def candidates(line: str) -> list[str]:
    """Return what the last word of a line may become; behind `=`, where shells begin a word, the value alone."""
    words = line.split()
    last = "" if not words or line.endswith(" ") else words[-1]
    menu = run_menu(extensions_in(words))
    name, is_value, typed = last.partition("=")
    if not is_value:
        return _beginning(last, [*(f"{name}=" for name in [*menu.groups, *menu.keys]), *FLAGS])
    before, comma, value = typed.rpartition(",")
    return [f"{before}{comma}{found}" for found in _beginning(value, _values(name, menu))]


def _values(name: str, menu: Menu) -> Iterator[str]:
    if name in menu.groups:
        yield from menu.groups[name].options
    elif name in menu.keys:
        key = menu.keys[name]
        yield from key.choices or (("true", "false") if key.type_name == "bool" else ())


def _beginning(typed: str, known: Iterable[str]) -> list[str]:
    return sorted(word for word in known if word.startswith(typed))
