"""Refuses arguments that would run code, that are not text, or that set Hydra's folders.

Hydra builds objects from its own part of the configuration: callbacks, launcher, sweeper, logging. The key `_target_`
names the class, and for logging also the key `()`. Neither key may be set on the command line. These parts may also not
be set as a whole, or by an interpolation, since the value could contain such a key. `--experimental-rerun` runs the
code in a pickle.

The launcher for Slurm writes its keys into a shell script: `setup` as lines, and other keys as comments. A line break
would end a comment. So `setup`, `additional_parameters` and values with unprintable characters are refused on the
command line.

Hydra's folders may not be set either. A sweep must find its records again, and Hydra would write to another folder
before any check of the lab.

Options are chosen by name (`hydra/job_logging=none`), so the objects that they build are described in files. These
files are the lab's, an installed plugin's, an extension's, or in a folder named with `--config-dir`, `--config-path` or
`hydra.searchpath`. Such a folder is trusted like a program, so it must not be one that others can write to.
"""

from __future__ import annotations

import re

from spec_lab.core.errors import UserError

UNPICKLES = "--experimental-rerun"
BUILDS = re.compile(r"""(^|[\s.{,'"])(_target_|\(\))['"]?\s*[=:]""")
"""Matches one of the two keys, as a part of a dotted name or inside braces."""
BUILT = ("callbacks", "launcher", "sweeper", "job_logging", "hydra_logging")
SHELL_LINES = re.compile(r"hydra\.launcher\.(setup|additional_parameters)")
FOLDERS = re.compile(r"hydra\.(run|sweep|output_subdir|job\.name)(\.|$)")
KEY = re.compile(r"^[+~]*(?P<key>[^=]*)=?(?P<value>.*)$", re.DOTALL)


def refuse_argument(argument: str) -> None:
    """Raise UserError if `argument` would run code, is not text, or sets one of Hydra's folders."""
    if "\0" in argument or not _is_text(argument):
        raise UserError(f"{argument!r} is not text in UTF-8; leave out what cannot be printed")
    if argument.partition("=")[0] == UNPICKLES:
        raise UserError(f"{UNPICKLES} runs code from a pickle; type the overrides of config.yaml again")
    if BUILDS.search(argument):
        raise UserError(f"{argument}: _target_ and () choose code to run; only files of options may set them")
    matched = KEY.match(argument)
    assert matched is not None
    if _is_built(matched["key"]) and ("{" in matched["value"] or matched["key"] == "hydra"):
        raise UserError(f"{argument}: Hydra builds this only from files of options; choose one, or set single values")
    if FOLDERS.match(matched["key"]):
        raise UserError(f"{argument}: the lab itself names its folders; use output_dir=outputs and name=run")
    is_of_launcher = matched["key"].startswith("hydra.launcher")
    if SHELL_LINES.match(matched["key"]) or (is_of_launcher and not argument.isprintable()):
        raise UserError(
            f"{argument!r}: a shell would run it; write an option hydra/launcher/MINE.yaml and name its folder with "
            "--config-dir (docs/use.md)"
        )


def _is_built(key: str) -> bool:
    parts = key.split(".")
    return parts[0] == "hydra" and (len(parts) == 1 or parts[1] in BUILT)


def _is_text(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True
