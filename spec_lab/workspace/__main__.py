"""`python -m spec_lab.workspace ENTITY/PROJECT`: lay out the page of a W&B project, and save it on W&B's server.

A call saves a new view of the project; views are chosen and deleted in W&B. `--dry-run` saves nothing: it prints
the view as JSON, and needs neither key nor network.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from spec_lab.core.ending import ended, leave
from spec_lab.core.errors import UserError

REACH_SECONDS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Save or print what `arguments` (default: those of the process) ask for and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return ended(lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m spec_lab.workspace",
        description="Lay out the page of a W&B project: acceptance, speed and kernel time. Saving needs W&B's server.",
    )
    parser.add_argument("place", metavar="ENTITY/PROJECT", help="W&B user or team, and the project of logger.project")
    parser.add_argument("--name", default="spec_lab", help="name of the view (default: spec_lab)")
    parser.add_argument("--dry-run", action="store_true", help="print the view as JSON, send nothing")
    return parser


def _run(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    entity, project = _place(options.place)
    if not options.name.strip():
        raise UserError("--name='': a view needs a name; leave it out for spec_lab")
    from spec_lab.workspace.layout import build_workspace

    workspace = build_workspace(entity, project, options.name)
    if options.dry_run:
        print(json.dumps(workspace._to_model().model_dump(by_alias=True, exclude_none=True), indent=2))
    else:
        print(f"saved: {_save(workspace)}")
    return 0


def _place(text: str) -> tuple[str, str]:
    """Return the two names of `ENTITY/PROJECT`."""
    from spec_lab.record.wandb_settings import ENTITY, project_problem

    entity, _, project = text.partition("/")
    if not ENTITY.fullmatch(entity) or project_problem(project) is not None:
        raise UserError(f"{text!r} is not ENTITY/PROJECT; write my-team/spec_lab, as in the address of the W&B project")
    return entity, project


def _save(workspace: Any) -> str:
    """Send a view to the server; returns its address."""
    import wandb

    from spec_lab.record.wandb_settings import describe_wandb_error, has_key, load_settings, malformed, settings_problem

    problem = settings_problem()
    if problem is not None:
        raise UserError(problem)
    if (key := load_settings().api_key) and (wrong := malformed(key)):
        raise UserError(f"WANDB_API_KEY, or the key in W&B's settings: {wrong}; correct it, or print it with --dry-run")
    if not has_key():
        raise UserError(
            "saving a workspace needs a key of W&B's server, and none is configured; set WANDB_API_KEY or run "
            "wandb login, or print it with --dry-run"
        )
    _reach(load_settings().base_url)
    try:
        return str(workspace.save().url)
    except (wandb.errors.Error, ValueError, KeyError, TypeError) as error:  # the last two: the answer has no view
        raise UserError(f"W&B did not save the workspace ({describe_wandb_error(error)}); check the names") from error


def _reach(address: str) -> None:
    """Raise UserError if no server answers, for which W&B itself would wait more than a minute."""
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(address, timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"saving a workspace needs W&B's server, and {address} does not answer ({reason}); print it with --dry-run"
        ) from error


if __name__ == "__main__":
    leave(main)
