"""This module finds out before a run starts whether W&B takes its names and settings, and whether there is a key.

W&B is imported only by what needs its own answer. No message of it is passed on that could hold a key.
"""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from spec_lab.core.errors import one_line

UNFIT_FOR_A_PROJECT = "/\\#?%:"
LONGEST_PROJECT = 128
ENTITY = re.compile(r"\w[\w.-]*", re.ASCII)
SECRETS = ("WANDB_API_KEY",)


def project_problem(project: str) -> str | None:
    """Say why W&B would not take the name of a project."""
    unfit = sorted(set(UNFIT_FOR_A_PROJECT) & set(project))
    if project.strip() and project.isprintable() and not unfit and len(project) <= LONGEST_PROJECT:
        return None
    limits = f"at most {LONGEST_PROJECT} characters, none of {' '.join(UNFIT_FOR_A_PROJECT)}"
    return f"logger.project={shown(project)} is no name of a W&B project ({limits}); use logger.project=spec_lab"


def entity_problem(entity: str | None) -> str | None:
    """Say why there is no W&B user or team of that name."""
    if entity is None or ENTITY.fullmatch(entity):
        return None
    return (
        f"logger.entity={shown(entity)} is no name of a W&B user or team (letters, digits, - and _); "
        "use logger.entity=null for that of the key"
    )


def group_problem(group: str | None) -> str | None:
    """Say why W&B would not take the name of a group."""
    if group is None or (group.strip() and group.isprintable() and len(group) <= LONGEST_PROJECT):
        return None
    limits = f"1 to {LONGEST_PROJECT} printable characters"
    return f"logger.group={shown(group[:LONGEST_PROJECT])} is no name of a W&B group ({limits}); use logger.group=null"


def load_settings() -> Any:
    """Return W&B's settings as its environment variables and files have them.

    W&B's own `setup` would start its service, a process, for a run that may be refused or only composed.

    Raises:
        wandb.errors.Error, ValueError: Something in them cannot be read.
    """
    import wandb
    from wandb.sdk import wandb_setup

    try:
        return wandb_setup.singleton().settings
    except (wandb.errors.Error, ValueError):
        wandb.teardown()  # W&B keeps settings that it read in part, and would not complain of them again
        raise


def settings_problem() -> str | None:
    """Say what W&B cannot read of its environment variables and settings files, such as WANDB_MODE=garbage."""
    import wandb

    try:
        load_settings()
    except (wandb.errors.Error, ValueError) as error:
        return f"W&B cannot read its settings: {describe_wandb_error(error)}; correct or unset it, or use logger=jsonl"
    return None


def key_problem(mode: str) -> str | None:
    """Say why a run cannot go online as `logger.mode` or, where that is auto, WANDB_MODE insists."""
    if mode_of_run(mode) != "online":
        return None
    if (key := load_settings().api_key) and (problem := malformed(key)):
        return f"WANDB_API_KEY, or the key in W&B's settings: {problem}; correct it, or use logger.mode=offline"
    if has_key():
        return None
    insists = "logger.mode=online" if mode == "online" else "WANDB_MODE=online"
    return (
        f"{insists} needs a key, and none is configured; set WANDB_API_KEY, run wandb login, or use logger.mode=offline"
    )


def malformed(key: str) -> str | None:
    """Return what W&B says of a key that it would not even send, without the key."""
    try:
        from wandb.sdk.lib.wbauth.validation import check_api_key
    except ImportError:  # no public name: another release may have it elsewhere, and says so when it logs in
        return None
    problem = check_api_key(key)
    return problem and problem.removesuffix(".")


def mode_of_run(mode: str) -> str:
    """Return what `logger.mode` comes to here: `auto` is what WANDB_MODE says, else online where there is a key."""
    if mode != "auto":
        return mode
    return os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")


def has_key() -> bool:
    """Tell whether credentials for W&B are configured, without asking for them."""
    settings = load_settings()
    if settings.api_key or settings.identity_token_file:
        return True
    try:
        entries = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return any(entries.authenticators(host) for host in (urlsplit(settings.base_url).netloc, "api.wandb.ai"))


def describe_wandb_error(error: Exception) -> str:
    """Say in a line what W&B complains about, with the environment variable at fault, and without a key."""
    details = getattr(error, "errors", None)
    text = ", ".join(map(_describe_setting, details())) if callable(details) else str(error).partition("\n")[0]
    for secret in filter(None, map(os.environ.get, SECRETS)):
        text = text.replace(secret, "...")
    return one_line(text) or type(error).__name__


def _describe_setting(detail: Mapping[str, Any]) -> str:
    """Describe one setting that does not validate; its value may be a secret and is left out."""
    name = ".".join(map(str, detail["loc"]))
    variable = f"WANDB_{name.upper()}"
    return f"{variable if variable in os.environ else name}: {detail['msg']}"


def shown(value: str) -> str:
    """Return a name as it was typed, or escaped where it would break the line."""
    return value if value.isprintable() and value.strip() else repr(value)
