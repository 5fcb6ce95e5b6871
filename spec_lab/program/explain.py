"""Explains in a line why a configuration does not compose: file, key, cause and remedy, as far as they are known.

Hydra and OmegaConf spread these over the lines of a message, the attributes of an exception, and its causes.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Sequence
from typing import Any

from hydra.errors import MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException, ValidationError

from spec_lab.core.errors import behind
from spec_lab.menu import registry
from spec_lab.menu.extensions import ENTRY_POINTS
from spec_lab.menu.nearest import hint, nearest, one_of
from spec_lab.program.options import Menu, run_menu
from spec_lab.program.override_text import as_override, typed
from spec_lab.program.overrides import SEVERAL, explain_unknown, extensions_in, in_words, with_extensions

PLACE = re.compile(r"In '(?P<option>[^']+)': ")
"""The beginning of some messages of Hydra, with the file that it was about to read, without suffix."""
UNMATCHED = re.compile(r"Could not override '(?P<name>[^'@]+)")
CHOSEN_AGAIN = re.compile(r"Multiple values for (?P<name>[^.]+)\. ")
APPENDED = re.compile(r"Could not append to config\. An item is already at '(?P<key>[^']+)'")
NO_SCHEMA = re.compile(r"In '(?P<option>[^']+)': Could not load '(?P<schema>schema/[^']+)'")
NO_OPTION = re.compile(r"In '(?P<place>[^']+)': Could not (find|load) '")
NO_PRIMARY = ("Primary config", "Cannot find primary config")
"""Hydra's messages if a flag names another folder, or if the lab's folder is removed while it starts."""
INTERVAL = "BasicSweeper does not support sweep type"
"""The message of Hydra's own sweeper for an interval."""
LAYOUT = "KEY: VALUE on lines of its own, below a line '# @package _global_' where it sets keys of several groups"
ONE_BASE = "below `defaults:`, an option of your own names one option of its group"
CHOICE = "a line `- override /drafter: ngram` below `defaults:` chooses one option of a group"
OVERRIDE = "below a first line '# @package _global_' and `defaults:`, write `- override /{name}: OPTION`"
OF_ITS_GROUP = "write its keys without the group above them"
OF_OTHERS = "write it in a file of experiment, below a first line '# @package _global_'"
NO_CHOICE = re.compile(r"Merge error: \w+ is not a subclass of \w+|field '\w+' is not Optional")
"""OmegaConf's messages for a value in place of a group."""
LOADER = "hydra._internal.config_loader_impl"
DEFAULTS_LISTS = "hydra._internal.defaults_list"
LONGEST_CAUSE = 200


def explain(error: Exception, menu: Menu | None = None) -> str:
    """Return an error of Hydra or OmegaConf in one line, with a remedy if the lab knows one.

    `menu` has the possible choices; None means those of a run.
    """
    menu, first = menu or run_menu(), first_line(error)
    no_schema = NO_SCHEMA.match(first)
    if no_schema:
        return (
            f"{no_schema['option'].replace('/', '=')}: its schema {no_schema['schema']} is not registered; name the "
            "module that registers it with extensions=[MODULE] (docs/extend.md)"
        )
    if first.startswith("Ambiguous value for argument"):
        argument = first.split("'")[1]
        key, _, value = argument.partition("=")
        if os.path.lexists(value):
            return f"{argument} has several values, but must be a path; type {typed(as_override(key, value))}"
        return f"{argument} gives several values; add -m to run them all"
    again = CHOSEN_AGAIN.match(first)
    if again:
        name = again["name"]
        return f"a file of options chooses a second {name}; {OVERRIDE.format(name=name)}"
    there = APPENDED.match(first)
    if there:
        key = there["key"]
        return f"{key} exists already, so +{key} adds nothing; write {key} without + in the command or its file"
    if first.startswith(NO_PRIMARY):
        return f"{first.removesuffix('.')}; leave out --config-path and --config-name, or install the lab again"
    if first.startswith(INTERVAL):
        return "interval(...) has no number of values; sweep a few, such as KEY=0.1,0.5 or KEY=range(0,1,0.1)"
    no_option = NO_OPTION.match(first)
    if no_option and isinstance(error, MissingConfigException):
        return _missing_option(error, no_option["place"], menu)
    file = _local_of(error, "hydra._internal.core_plugins.file_config_source", "full_path")
    if file is not None:
        cause = "it refers to itself, or is nested too deep" if isinstance(error, RecursionError) else _cause(error)
        return f"{file}: cannot be read as options ({cause}); correct it: UTF-8 text, {LAYOUT}"
    if isinstance(error, RecursionError):
        file = f"{_local_of(error, DEFAULTS_LISTS, 'path') or 'a file of options'}.yaml"
        return f"{file}: its defaults list includes itself; remove that line"
    return _in_its_file(error, first, menu)


def read_too_late(extensions: Sequence[str]) -> str:
    """Return the refusal of a file that names extensions, since these must be loaded before files are read."""
    typed = f"type extensions=[{','.join(extensions)}] on the command line"
    return (
        f"extensions is read before anything is composed: {typed}, or install it with the entry point group "
        f"{ENTRY_POINTS}"
    )


def _extensions_named_by(option: str, error: Exception) -> list[str]:
    """Return the extensions named in the file that caused the error; empty if none are, or all were loaded in time."""
    files, typed = (_local_of(error, LOADER, name) for name in ("caching_repo", "overrides"))
    loaded = None if files is None or not option else files.load_config(option)
    content = None if loaded is None else loaded.config
    names = OmegaConf.select(content, "extensions") if isinstance(content, DictConfig) else None
    if not isinstance(names, ListConfig):
        return []
    there = {extension.name for extension in registry.load(extensions_in(typed)).extensions}
    return [] if there.issuperset(names) else [str(name) for name in names]


def not_read(key: str, menu: Menu) -> str:
    """Return the refusal of a key that no chosen option reads."""
    group = key.partition(".")[0]
    owners = menu.keys[key].defaults if key in menu.keys and group in menu.groups else {}
    remedy = f"leave it out or choose {one_of(group, owners)}" if owners else "leave it out"
    return f"{key} is not read by the chosen options; {remedy}"


def _missing_option(error: MissingConfigException, place: str, menu: Menu) -> str:
    """Explain that a file of options, or the command line, chooses an option that does not exist.

    `place` is the file that Hydra was about to read, without suffix.
    """
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    overrides = _local_of(error, "hydra._internal.defaults_list", "overrides")
    override = None if overrides is None else overrides.override_metadata.get(group)
    if override is not None and override.external_override:
        begin = f"{group}={option}"
    else:
        file = place if override is None else override.containing_config_path
        too_late = _extensions_named_by(file, error)
        if too_late:
            return read_too_late(too_late)
        begin = f"{file}.yaml"
    if _group_named(group, menu):
        return f"{begin}: reads {group} as a folder of its own; {OVERRIDE.format(name=_group_named(group, menu))}"
    if not error.options:
        return f"{begin}: there is no {error.missing_cfg_file}{hint(nearest(group, menu.groups))}"
    near = nearest(option, error.options)
    remedy = hint(near) if near else f"; it takes one of {', '.join(error.options)}"
    return with_extensions(f"{begin}: {group} has no option {option}{remedy}", group, menu)


def _group_named(place: str, menu: Menu) -> str | None:
    """Return the group that a file means by a place below its own group, such as drafter for experiment/drafter.

    None for any other place.
    """
    above, _, name = place.rpartition("/")
    return name if above and name in menu.groups else None


def _in_its_file(error: Exception, first: str, menu: Menu) -> str:
    """Explain what is wrong with a key, beginning with the file of options that sets it, if there is one."""
    place = PLACE.match(first)
    option, message = (place["option"], first.removeprefix(place[0])) if place else ("", first)
    too_late = _extensions_named_by(option, error)
    if too_late:
        return read_too_late(too_late)
    begin = f"{option}.yaml: " if option else ""
    unmatched = UNMATCHED.match(message)
    if unmatched:
        name = unmatched["name"]
        if name in menu.groups or _group_named(name, menu):
            group = _group_named(name, menu) or name
            return f"{begin}no {group} is chosen at the place where the file reads it; {OVERRIDE.format(name=group)}"
        return begin + (not_read(name, menu) if name in menu.keys else explain_unknown(name, menu))
    wrong = next((one for one in behind(error) if isinstance(one, OmegaConfBaseException)), None)
    if wrong is not None and option.startswith("schema/") and NO_CHOICE.match(_cause(wrong)):
        group, name = option.split("/")[1:3]
        return (
            f"a file of {group} names {name} and another option of {group}; leave one out: {ONE_BASE}, and a "
            "sweep's params name several as `a,b`"
        )
    if isinstance(wrong, ConfigKeyError) and "/point/" in option:
        group = str(wrong.full_key).partition(".")[0]
        if str(wrong.full_key) in menu.keys and group in menu.groups:
            said = f"{wrong.full_key} is not read by the chosen {group}; the file is for another one"
            return f"{begin}{said}; leave {group}=... out, or remove the key from the file"
    if wrong is not None:
        return begin + _wrong_key(wrong, option.rpartition("/")[0], menu)
    cause = str(error.__cause__ or "").partition("\n")[0]
    return begin + (f"{message.removesuffix('.')}: {cause}" if cause and cause not in message else message)


def _wrong_key(error: OmegaConfBaseException, group: str, menu: Menu) -> str:
    """Explain an error of OmegaConf. `group` is the group of the file that caused it; empty if no file did."""
    key, cause = str(error.full_key or ""), _cause(error)
    if isinstance(error, InterpolationResolutionError):
        return f"{key}: {cause}; replace it by a value"
    no_choice = NO_CHOICE.match(cause)
    if no_choice and (not key or key in menu.groups):
        return f"its contents do not fit ({no_choice[0]}); write {LAYOUT}, and {CHOICE}"
    if isinstance(error, ConfigKeyError) and key in menu.groups and key != group.partition("/")[0]:
        option = next(iter(menu.groups[key].options))
        return f"{key} is chosen on the command line, with {key}={option}; leave it out here"
    if isinstance(error, ConfigKeyError) and key in menu.keys:
        return not_read(key, menu)
    inner = key.removeprefix(f"{group}.")
    if isinstance(error, ConfigKeyError) and inner != key and inner in (*menu.groups, *menu.keys):
        return f"it sets keys of {group}, and {inner} is none; {OF_ITS_GROUP if inner == group else OF_OTHERS}"
    if isinstance(error, ConfigKeyError) and key and key != group.partition("/")[0]:
        return explain_unknown(key, menu)
    if not key or isinstance(error, ConfigKeyError):
        cause = f"they would be keys of {group}, which cannot have keys" if key else cause
        return f"its contents do not fit ({cause}); write {LAYOUT}"
    if isinstance(error, ValidationError) and key in menu.keys:
        several = SEVERAL if "of type 'list'" in cause else ""
        takes = ", ".join(menu.keys[key].choices) or in_words(menu.keys[key])
        return f"{key} takes {takes} ({cause}){several}"
    return cause if key in cause else f"{key}: {cause}"


def _local_of(error: BaseException, module: str, name: str) -> Any:
    """Return a local variable of the Hydra function that raised `error`, since no message has it; None if there is no
    such variable."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_globals["__name__"] == module]
    return next((frame.f_locals[name] for frame in reversed(frames) if name in frame.f_locals), None)


def _cause(error: Exception) -> str:
    return first_line(error).removesuffix(".")[:LONGEST_CAUSE]


def first_line(error: Exception) -> str:
    """Return the first non-empty line of a message, after which libraries may write pages; else the error's class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
