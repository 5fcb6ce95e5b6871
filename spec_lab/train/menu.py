"""What `python -m spec_lab.train` lets choose: the groups of `conf/train` and every key in its files.

Read without torch, so that help and typo checks are instant. So a key's type is that of its value in the files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from spec_lab.cli.options import Group, Key, Menu, conf_folder, groups_in

GROUPS = {
    "drafter": "what is trained, on texts that the target writes",
    "target": "what it is trained for",
    "debug": "cheap settings to see that it runs",
}

EXPLANATIONS = {
    "drafter.num_unrolled_steps": "draft steps that training unrolls",
    "drafter.step_loss_decay": "weight of a step's loss beside that of the step before",
    "drafter.intermediate_size": "width of the feed-forward network",
    "drafter.hidden_size": "width of the layers",
    "drafter.num_modules": "MTP modules; 1 is used again at every step",
    "drafter.num_layers": "depth",
    "drafter.draft_vocab_size": "tokens that can be drafted: those the target writes most",
    "drafter.kv_source_layers": "layers of the target whose KV is read, one a drafter layer",
    "drafter.optimisation.num_steps": "training steps",
    "drafter.optimisation.batch_size": "rows a step",
    "drafter.optimisation.peak_learning_rate": "reached after the warm-up, then linearly to zero",
    "target.hidden_size": "width of the layers",
    "target.num_layers": "depth",
    "target.natural_fraction": "share of code and prose in a batch; the rest are generated examples",
    "target.optimisation.num_steps": "training steps",
    "target.optimisation.batch_size": "rows a step",
    "seed": "of weights, examples and batches",
    "device": "auto, cpu, cuda or cuda:N; auto takes a GPU if there is one",
    "num_workers": "processes that prepare text; null: one a core",
    "output_dir": "where all is kept and the same command goes on; target=shipped: outputs/train-drafters",
    "corpus.num_examples_per_category": "generated examples for a new target",
    "generations.num_checkable_prompts": "prompts of each checkable category that the target answers for the drafter",
    "generations.num_natural_prompts": "prompts of code and of prose that it continues for the drafter",
    "generations.max_new_tokens": "tokens it writes after each",
    "evaluation.num_draft_tokens": "K of the acceptance length on the card",
    "evaluation.limit_per_category": "prompts of each category it is measured on; null: all",
}
"""Of the keys that `--help` lists."""

READ_FOR = {"tokenizer": "target", "corpus": "target", "generations": "drafter"}
"""Stages that run only where this group's part is trained."""


def train_folder() -> Path:
    """`conf/train`."""
    return conf_folder() / "train"


@cache
def train_menu() -> Menu:
    """The groups, and all keys by their dotted names: those of an option with its own values."""
    groups = groups_in(train_folder(), GROUPS, {})
    values: dict[str, dict[str, Any]] = {}
    for group in groups.values():
        for option, content in parts_of(group).items():
            for name, value in _leaves(content, f"{group.name}."):
                values.setdefault(name, {})[option] = value
    config = yaml.safe_load((train_folder() / "config.yaml").read_text(encoding="utf-8"))
    top = {name: value for name, value in config.items() if name not in ("defaults", "hydra")}
    values |= {name: {"": value} for name, value in _leaves(top, "")}
    del values["drafter.name"]  # the option's
    return Menu(groups, {name: _key(name, by_option) for name, by_option in values.items()})


def parts_of(group: Group) -> dict[str, dict[str, Any]]:
    """The options that describe a part; the others (`none`, `shipped`, a debug setting) set keys elsewhere."""
    return {option.name: option.values for option in group.options.values() if "_target_" in option.values}


def _leaves(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        elif name != "_target_":
            yield prefix + name, value


def _key(name: str, by_option: dict[str, Any]) -> Key:
    value = next(iter(by_option.values()))
    schema = dataclasses.make_dataclass("Knob", [(name.rpartition(".")[2], _type_of(value))])
    return Key(name, EXPLANATIONS.get(name, ""), _type_name(value), (schema,), by_option)


def _type_of(value: Any) -> Any:
    """Every null of these files stands for a count without a limit."""
    if value is None:
        return int | None
    return list[int] if isinstance(value, list) else type(value)


def _type_name(value: Any) -> str:
    return "int or null" if value is None else type(value).__name__
