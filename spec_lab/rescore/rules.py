"""Reads the rules given to `python -m spec_lab.rescore`, each with its knobs. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser

from spec_lab.app.compose import compose
from spec_lab.core.errors import UserError
from spec_lab.menu import registry
from spec_lab.menu.config import RunConfig
from spec_lab.menu.refusals.run import admit

GROUP = "acceptance"
EXTENSIONS = "extensions"


@dataclass(frozen=True, slots=True)
class NamedRule:
    """A rule with one value for each knob that the user typed.

    Attributes:
        name: the rule and these knobs without the group's name, such as `relaxed_thinking topk=3`.
        config: the config of a run with this rule.
    """

    name: str
    config: RunConfig


def read_rules(arguments: Sequence[str], num_draft_tokens: int) -> list[NamedRule]:
    """Read the rules in `acceptance=RULE acceptance.KNOB=VALUE ...`.

    Each `acceptance=` begins a rule, and values separated by commas give several rules. `extensions=[MODULE]` may be
    among the arguments, for rules of an extension. A rule must fit `num_draft_tokens`, the K of the run.

    Raises:
        UserError: a rule does not compose or cannot judge recorded runs, or there is none.
    """
    shared = [argument for argument in arguments if argument.startswith(f"{EXTENSIONS}=")]
    rules: list[list[str]] = []
    for argument in arguments:
        if argument.startswith(f"{GROUP}="):
            rules.append([])
        if argument not in shared and rules:
            rules[-1].append(argument)
    if not rules:
        raise UserError(f"no rule is named; add {GROUP}=RULE")
    shared.append(f"drafter.num_draft_tokens={num_draft_tokens}")
    return [_read(rule, shared) for typed in rules for rule in itertools.product(*map(_expanded, typed))]


def is_of_a_rule(argument: str) -> bool:
    """Return whether an argument is for `read_rules`, and not something else such as a folder."""
    return argument.startswith((f"{GROUP}=", f"{GROUP}.", f"{EXTENSIONS}="))


def _expanded(argument: str) -> list[str]:
    """Return a `KEY=VALUE` for each value of a sweep such as `acceptance.topk=3,10`."""
    override = OverridesParser.create().parse_override(argument)
    if not override.is_sweep_override():
        return [argument]
    return [f"{override.key_or_group}={value}" for value in override.sweep_string_iterator()]


def _read(overrides: Sequence[str], of_the_run: Sequence[str]) -> NamedRule:
    config = compose([*of_the_run, *overrides]).config
    registry.load(config.extensions).judge_of(config.acceptance.name)
    admit(config)
    name = " ".join(each.removeprefix(f"{GROUP}=").removeprefix(f"{GROUP}.") for each in overrides)
    return NamedRule(name, config)
