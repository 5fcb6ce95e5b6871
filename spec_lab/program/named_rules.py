"""Reads the rules given to `python -m spec_lab.rescore`, each with its knobs. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType

from spec_lab.core.errors import UserError
from spec_lab.menu import registry
from spec_lab.menu.config import RunConfig
from spec_lab.menu.refusals.run import refusals
from spec_lab.program.compose import compose_run
from spec_lab.program.options import run_menu
from spec_lab.program.override_text import parse_override
from spec_lab.program.overrides import extensions_in

GROUP = "acceptance"
EXTENSIONS = "extensions"
MAX_RULES = 200


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
        UserError: an argument is mistyped, is not for a rule, does not fit its rule, or names a rule that cannot judge
            recorded runs; or there is no rule, or too many.
    """
    shared = [argument for argument in arguments if argument.startswith(f"{EXTENSIONS}=")]
    extensions_in(shared)
    arguments = [argument for argument in arguments if argument not in shared]
    if not arguments:
        raise UserError(f"no rule is named; add {GROUP}=RULE")
    products = [itertools.product(*map(_expand, typed)) for typed in _split(arguments)]
    rules = list(itertools.islice(itertools.chain.from_iterable(products), MAX_RULES + 1))
    if len(rules) > MAX_RULES:
        raise UserError(f"there are more than {MAX_RULES} rules; name fewer values")
    return [_read_rule(rule, [*shared, f"drafter.num_draft_tokens={num_draft_tokens}"]) for rule in rules]


def is_of_a_rule(argument: str) -> bool:
    """Return whether an argument is for `read_rules`, and not something else such as a folder."""
    key, equals, _ = argument.lstrip("+").partition("=")
    return bool(equals) and (key in (GROUP, EXTENSIONS) or key.startswith(f"{GROUP}."))


def _split(arguments: Sequence[str]) -> list[list[str]]:
    rules: list[list[str]] = []
    for argument in arguments:
        key = argument.partition("=")[0].lstrip("+")
        if key == GROUP:
            rules.append([])
        elif not key.startswith(f"{GROUP}."):
            raise UserError(
                f"{argument}: name a rule with {GROUP}=RULE {GROUP}.KNOB=VALUE; besides, {EXTENSIONS}=[MODULE] is read"
            )
        elif not rules:
            raise UserError(f"{argument}: name the rule before its knobs, {GROUP}=RULE {argument}")
        rules[-1].append(argument)
    return rules


def _expand(argument: str) -> list[str]:
    """Return a `KEY=VALUE` for each value of a sweep such as `acceptance.topk=3,10`. The values are checked later, when
    they are composed."""
    if "=" not in argument:
        return [argument]
    override = parse_override(OverridesParser.create(), argument, run_menu())
    if not override.is_sweep_override():
        return [argument]
    if not override.is_discrete_sweep() or override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        raise UserError(f"{argument}: name the values, separated by commas")
    values = list(itertools.islice(override.sweep_string_iterator(), MAX_RULES + 1))
    if not 0 < len(values) <= MAX_RULES:
        problem = f"names more than {MAX_RULES} values; name fewer" if values else "names no value"
        raise UserError(f"{argument}: {problem}")
    return [f"{override.key_or_group}={value}" for value in values]


def _read_rule(overrides: Sequence[str], of_the_run: Sequence[str]) -> NamedRule:
    config, _ = compose_run([*of_the_run, *overrides])
    registry.load(config.extensions).judge_of(config.acceptance.name)
    for refusal in refusals(config):
        raise UserError(
            f"{refusal}; the drafter's keys belong to the run, so a change needs a new run"
            if "drafter." in refusal
            else refusal
        )
    return NamedRule(" ".join(_bare(override) for override in overrides), config)


def _bare(override: str) -> str:
    key, _, value = override.partition("=")
    return value if key == GROUP else f"{key.removeprefix(f'{GROUP}.')}={value}"
