"""Makes the texts of `--help` and `--version`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spec_lab.core.errors import UserError
from spec_lab.menu.nearest import hint, nearest
from spec_lab.program.flags import DRY_RUN_FLAG, FLAGS_THAT_ADD_OPTIONS, split_flags
from spec_lab.program.options import Group, Key, Menu, run_menu

INTRODUCTION = """\
spec_lab: speculative decoding, with every part chosen on the command line and the baseline measured beside it.

  python -m spec_lab drafter=eagle3 prune=catchup
  python -m spec_lab -m drafter=eagle3,ngram,oracle,random batch_size=1,8
"""

FLAGS = {
    "-m, --multirun": "run every combination of the values given with commas",
    DRY_RUN_FLAG: "print the composed parts and what would be refused, run nothing",
    "--cfg job": "print the composed config as YAML",
    "--hydra-help": "Hydra's own flags",
    "--version": "the versions of spec_lab and Hydra",
    "-h, --help": "this text; --help GROUP shows one group, such as --help drafter",
}

NAME_WIDTH = 32


def help_text(extensions: tuple[str, ...] = (), groups: Sequence[str] = ()) -> str:
    """Return the help of `python -m spec_lab`, or only that of some of its groups.

    Raises:
        UserError: there is no such group.
    """
    menu = run_menu(extensions)
    for name in groups:
        if name not in menu.groups:
            raise UserError(f"--help {name}: there is no group {name}{hint(nearest(name, menu.groups))}")
    if groups:
        return "\n\n".join(_describe_group(menu.groups[name], _keys_of(name, menu)) for name in groups)
    return f"{INTRODUCTION.rstrip()}\n\n{describe_menu(menu)}"


def groups_in_help(arguments: Sequence[str]) -> list[str]:
    """Return the groups whose help is asked for: the arguments next to `--help` that are not overrides.

    Raises:
        UserError: a flag adds a folder of options, which no help shows, or `split_flags` refuses an argument.
    """
    flags, others = split_flags(arguments)
    adding = next((flag for flag in flags if flag in FLAGS_THAT_ADD_OPTIONS), None)
    if adding is not None:
        raise UserError(f"--help does not read {adding}; leave it out, or see a file's options with --cfg job")
    return [text for text in others if "=" not in text]


def _keys_of(group: str, menu: Menu) -> list[Key]:
    return [key for key in menu.keys.values() if key.name.startswith(f"{group}.")]


def version_text() -> str:
    """Return what `--version` prints."""
    from importlib import metadata

    from spec_lab.core.version import VERSION

    return f"spec_lab {VERSION} (Hydra {metadata.version('hydra-core')})"


def describe_menu(menu: Menu) -> str:
    """Describe a program's options, its keys, and the flags in `FLAGS`."""
    keys = list(menu.keys.values())
    sections = ["Options, GROUP=OPTION (* is the default), and the keys they read, KEY=VALUE [default]"]
    sections += [_describe_group(group, _keys_of(group.name, menu)) for group in menu.groups.values()]
    grouped = tuple(f"{name}." for name in menu.groups)
    others = [_describe_key(key, "") for key in keys if not key.name.startswith(grouped)]
    sections.append("\n".join(["All other keys, KEY=VALUE [default]", *others]))
    sections.append("\n".join(["Flags", *_describe_flags(menu)]))
    return "\n\n".join(section.rstrip() for section in sections)


def _describe_group(group: Group, keys: list[Key]) -> str:
    lines = [f"{group.name}: {group.explanation}"]
    with_keys = {option for key in keys for option in key.defaults}
    for option in group.options.values():
        mark = "*" if option.name == group.default else " "
        lines.append(f"{mark} {f'{group.name}={option.name}':{NAME_WIDTH}} {option.description}")
    for key in keys:
        readers = "" if with_keys == set(key.defaults) else f"{', '.join(key.defaults)}: "
        lines.append(_describe_key(key, readers))
    return "\n".join(lines)


def _describe_flags(menu: Menu) -> list[str]:
    flags = {flag: does for flag, does in FLAGS.items() if flag != DRY_RUN_FLAG or "dry_run" in menu.keys}
    return [f"  {flag:{NAME_WIDTH}} {does}" for flag, does in flags.items()]


def _describe_key(key: Key, readers: str) -> str:
    """Return the line of a key. `readers` names the options that have it, or is empty."""
    takes = f": {_describe_choices(key.choices)}" if key.choices else ""
    bounds = key.bounds.in_words()
    within = f" ({bounds})" if bounds else ""
    return f"  {key.name:{NAME_WIDTH}} {key.explanation}{takes}{within} [{readers}{_describe_defaults(key.defaults)}]"


def _describe_choices(choices: dict[str, str]) -> str:
    return ", ".join(f"{choice} ({meaning})" if meaning else choice for choice, meaning in choices.items())


def _describe_defaults(defaults: dict[str, Any]) -> str:
    """Return one value if all options agree, else the most common one and the differing options: `null, pocket: 9`."""
    shown = {option: show_value(value) for option, value in defaults.items()}
    texts = list(shown.values())
    commonest = max(texts, key=texts.count)
    others = [f"{option}: {text}" for option, text in shown.items() if text != commonest]
    return ", ".join([commonest, *others])


def show_value(value: Any) -> str:
    """Return a value as it is typed on the command line, but without quotes."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(map(show_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
