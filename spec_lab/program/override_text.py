"""Reads a `KEY=VALUE` text as Hydra does, and writes values so that Hydra reads them unchanged."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from spec_lab.core.errors import UserError
from spec_lab.menu.nearest import hint, nearest
from spec_lab.program.flags import DRY_RUN_FLAG
from spec_lab.program.options import Menu

FILES = (".yaml", ".yml", ".json", ".jsonl", ".toml", ".txt", ".py")
NO_FLAG = (
    "a flag is read on the command line only; write KEY=VALUE, such as hydra.searchpath=[file:///FOLDER] for a folder "
    "of options"
)


def parse_override(parser: OverridesParser, text: str, menu: Menu) -> Override:
    """Read a `KEY=VALUE` text as Hydra does.

    Raises:
        UserError: the text has another form.
    """
    if "=" not in text and not text.startswith("~"):
        owners = [f"{group.name}={text}" for group in menu.groups.values() if text in group.options]
        name, colon, value = text.partition(":")
        if colon and (name in menu.groups or name in menu.keys):
            owners = [f"{name}={value.strip() or 'VALUE'}"]
        if text[:1] == "@" != text:  # argparse's sign for a file of arguments
            said = f"a file of words is not read: type $(cat {text[1:]})"
            raise UserError(f"{text}: not of the form KEY=VALUE; {said}")
        if text.startswith("-") and text != DRY_RUN_FLAG:
            raise UserError(f"{text}: {NO_FLAG}")
        if not owners and (Path(text).suffix in FILES or Path(text).is_file()):
            raise UserError(f"{text}: not of the form KEY=VALUE; a file is not read here, see --help")
        is_path = "/" in text and text.partition("/")[0] not in menu.groups
        near = None if is_path else nearest(text, [*menu.groups, *menu.keys])
        suggestion = hint(" or ".join(owners) or (f"{near}=VALUE" if near else None))
        is_word = text.isidentifier() or text.startswith("-") or "/" in text
        blank = "" if owners or near or is_word or not text else ". A blank ends a value: write KEY=1,3"
        raise UserError(f"{text or repr(text)}: not of the form KEY=VALUE{suggestion}{blank}")
    try:
        return parser.parse_override(text)
    except HydraException as error:
        if text.startswith("-"):
            raise UserError(f"{text}: {NO_FLAG}") from error
        if text.endswith(",") and not any(bracket in text for bracket in "[{("):
            raise UserError(f"{text}: nothing follows the last comma; write values without blanks: KEY=1,3") from error
        reason = str(error).splitlines()[0].partition(" expecting ")[0]
        raise UserError(f"{text}: not of the form KEY=VALUE ({reason}); {_readable(text, menu)}") from error


def _readable(text: str, menu: Menu) -> str:
    """Return a remedy for a text that Hydra cannot read: several overrides, or signs with a meaning in its grammar."""
    words = text.split()
    if len(words) > 1 and all(_names_key(word, menu) for word in words):
        return f"give each as a word of its own: {shlex.join(words)}"
    key, _, value = text.partition("=")
    if not re.fullmatch(r"[+~]*[\w./@:-]+", key):
        return "each word sets one key that --help names, as in batch_size=4"
    type_name = menu.keys[key].type_name if key in menu.keys else ""
    if type_name.startswith("list") and value.startswith("[") and value.endswith(","):
        return f"a blank ends a word, so quote the whole list: {typed(f'{key}={value} ...]')}"
    if type_name.startswith("list[str]") and re.fullmatch(r"\[?[^'\"\[\]]+\]?", value):
        items = ",".join(f"'{_in_full(item.strip())}'" for item in value.strip("[]").split(","))
        return f"if the list has texts with such signs, type {typed(f'{key}=[{items}]')}"
    if type_name.startswith("str") and value[:1] not in tuple("'\""):
        return f"if the value is a text with such signs, type {typed(as_override(key, _in_full(value)))}"
    values = re.findall(r"[^\s;|,(){}\[\]'\"]+", value)
    is_one = key in menu.groups or (bool(type_name) and not type_name.startswith(("list", "str")))
    if is_one and len(values) > 1:
        return f"with -m several values stand with commas alone: {key}={','.join(values)}"
    return "close its brackets and quotes, and quote special characters"


def _in_full(value: str) -> str:
    """Replace ~ by the home folder, since most shells do not expand it after `KEY=`."""
    return str(Path(value).expanduser()) if value.startswith("~/") else value


def typed(text: str) -> str:
    """Return a text quoted for a shell: in double quotes if these suffice, since the text may have single quotes
    inside."""
    return shlex.quote(text) if set(text) & set('"$`\\!') else f'"{text}"'


def _names_key(word: str, menu: Menu) -> bool:
    key, sign, value = word.lstrip("+").partition("=")
    return bool(sign) and "=" not in value and (key in menu.groups or key in menu.keys)


def as_override(key: str, value: object) -> str:
    """Return `KEY=VALUE` that Hydra reads as exactly the text of `value`, such as a path with special characters."""
    # Within quotes Hydra reads a backslash literally, except before a quote.
    quoted = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), str(value))
    return f"{key}='{quoted}'"
