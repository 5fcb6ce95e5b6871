"""Checks before a run starts whether W&B would accept the names and settings, and whether there is a key.

W&B is imported only by functions that must ask it. No message of W&B that could contain a key is passed on.
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
    """Return why W&B would refuse the name of a project; None if it would not."""
    unfit = sorted(set(UNFIT_FOR_A_PROJECT) & set(project))
    if project.strip() and project.isprintable() and not unfit and len(project) <= LONGEST_PROJECT:
        return None
    limits = f"at most {LONGEST_PROJECT} characters, none of {' '.join(UNFIT_FOR_A_PROJECT)}"
    return f"logger.project={shown(project)} is not the name of a W&B project ({limits}); use logger.project=spec_lab"


def entity_problem(entity: str | None) -> str | None:
    """Return why no W&B user or team can have this name; None if one can."""
    if entity is None or ENTITY.fullmatch(entity):
        return None
    return (
        f"logger.entity={shown(entity)} is not the name of a W&B user or team (letters, digits, . - and _); use "
        "logger.entity=null for the key's own"
    )


def group_problem(group: str | None) -> str | None:
    """Return why W&B would refuse the name of a group; None if it would not."""
    if group is None or (group.strip() and group.isprintable() and len(group) <= LONGEST_PROJECT):
        return None
    limits = f"1 to {LONGEST_PROJECT} printable characters"
    return (
        f"logger.group={shown(group[:LONGEST_PROJECT])} is not the name of "
        f"a W&B group ({limits}); use logger.group=null"
    )


def load_settings() -> Any:
    """Read W&B's settings from its environment variables and files.

    W&B's own `setup` is not called, since it would start a process for a run that may be refused or only composed.

    Raises:
        wandb.errors.Error, ValueError: a setting cannot be read.
    """
    import wandb
    from wandb.sdk import wandb_setup

    try:
        return wandb_setup.singleton().settings
    except (wandb.errors.Error, ValueError):
        wandb.teardown()  # W&B keeps settings that it has read in part, and would not report the error again
        raise


def settings_problem() -> str | None:
    """Return what W&B cannot read in its environment variables and settings files, such as WANDB_MODE=garbage."""
    import wandb

    try:
        load_settings()
    except (wandb.errors.Error, ValueError) as error:
        return f"W&B cannot read its settings: {describe_wandb_error(error)}; correct or unset it, or use logger=jsonl"
    return None


def key_problem(mode: str) -> str | None:
    """Return why a run that `mode_of_run` makes online cannot be; None if it can, and for any other run."""
    if mode_of_run(mode) != "online":
        return None
    if (key := load_settings().api_key) and (problem := malformed(key)):
        return f"WANDB_API_KEY, or the key in W&B's settings: {problem}; correct it, or use logger.mode=offline"
    if has_key():
        return None
    insists = "logger.mode=online" if mode == "online" else "WANDB_MODE=online"
    return (
        f"{insists} needs a key, but none is configured; set WANDB_API_KEY, run wandb login, or use logger.mode=offline"
    )


def malformed(key: str) -> str | None:
    """Return W&B's reason, without the key, if the key is malformed; else None."""
    try:
        from wandb.sdk.lib.wbauth.validation import check_api_key
    except ImportError:  # a private name that other releases may lack; W&B then reports a bad key at login
        return None
    problem = check_api_key(key)
    return problem and problem.removesuffix(".")


def mode_of_run(mode: str) -> str:
    """Return the mode of a run. `auto` is the value of WANDB_MODE if it is set, else online if there is a key."""
    if mode != "auto":
        return mode
    return os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")


def has_key() -> bool:
    """Return whether credentials for W&B are configured, without prompting for them."""
    settings = load_settings()
    if settings.api_key or settings.identity_token_file:
        return True
    try:
        entries = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return any(entries.authenticators(host) for host in (urlsplit(settings.base_url).netloc, "api.wandb.ai"))


def describe_wandb_error(error: Exception) -> str:
    """Return W&B's error in one line, without keys. A setting that W&B calls invalid is named, by its environment
    variable if that is set."""
    details = getattr(error, "errors", None)
    text = ", ".join(map(_describe_setting, details())) if callable(details) else str(error).partition("\n")[0]
    for secret in filter(None, map(os.environ.get, SECRETS)):
        text = text.replace(secret, "...")
    return one_line(text) or type(error).__name__


def _describe_setting(detail: Mapping[str, Any]) -> str:
    """Describe one invalid setting without its value, which may be a secret."""
    name = ".".join(map(str, detail["loc"]))
    variable = f"WANDB_{name.upper()}"
    return f"{variable if variable in os.environ else name}: {detail['msg']}"


def shown(value: str) -> str:
    """Return a name unchanged, or quoted and escaped if it is blank or would not print in one line."""
    return value if value.isprintable() and value.strip() else repr(value)
