"""An extension written for the last release: its names are still there, and its loaders get what they got."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec_lab import extend
from spec_lab.menu import registry
from spec_lab.menu.chosen import Chosen, choose
from spec_lab.menu.config import RunConfig
from spec_lab.menu.refusals.run import refusals
from tests.lab import make_config

OLD_LAB = """
from dataclasses import dataclass

from spec_lab.assembly.deferred import Deferred
from spec_lab.assembly.heads import make_picker
from spec_lab.assembly.option import CatchupPruningOption, DrafterOption, GraphOption, RuleOption
from spec_lab.config import AcceptanceConfig, Choice, DrafterConfig, GraphConfig, RunConfig, Weights, knob
from spec_lab.core.errors import UserError

@dataclass
class OldDrafterConfig(DrafterConfig):
    name: str = "old"
    offset: int = knob(0, "added to the id of a token", least=0)

@dataclass
class OldRuleConfig(AcceptanceConfig):
    name: str = "old"

@dataclass
class OldGraphConfig(GraphConfig):
    name: str = "old"

def offset_is_small(config: RunConfig):
    return None if config.drafter.offset < 9 else "drafter.offset is large; use drafter.offset=0"

def register(registry):
    registry.add(
        DrafterOption(
            name="old",
            schema=OldDrafterConfig,
            load=Deferred("old_parts", "load"),
            aspects=lambda config, options, models: [config.seed, options.offset, models.dtype],
            refusals=(offset_is_small,),
            no_loop="is old",
        ),
        RuleOption(name="old", schema=OldRuleConfig, build=Deferred("old_parts", "rule")),
        GraphOption(name="old", schema=OldGraphConfig, build=Deferred("old_parts", "graph"), num_launched=None),
        CatchupPruningOption(name="old", make=Deferred("old_parts", "prune")),
    )
"""
OLD_PARTS = """
def load(config, options, models):
    return lambda resources: (config.seed, options.offset, models.target.vocab_size)

def rule(config, options, resources):
    return config.seed, options.name, resources.models.device, resources.limits.num_slots, resources.seeds

def graph(config, options, models, limits):
    return config.seed, options.name, models.device, limits.num_slots

def prune():
    return "pruned"
"""


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chosen:
    """A run that chose what the extension adds."""
    (tmp_path / "old_lab.py").write_text(OLD_LAB)
    (tmp_path / "old_parts.py").write_text(OLD_PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    schemas = registry.load(["old_lab"]).schemas()
    config = make_config((tmp_path, tmp_path), "none", seed=7)
    config.extensions, config.prune.catchup = ["old_lab"], "old"
    config.drafter = schemas["drafter/old"](num_draft_tokens=2, offset=3)
    config.acceptance, config.graph = schemas["acceptance/old"](), schemas["graph/old"]()
    return choose(config)


def test_old_loaders_get_the_configuration_and_what_they_were_made_of(old: Chosen) -> None:
    build: Any = SimpleNamespace(
        target=SimpleNamespace(vocab_size=160), dtype="float32", device="cpu", num_slots=4, seeds="seeds"
    )
    config = old.config
    assert old.drafter.load(old, config.drafter, build)(None) == (7, 3, 160)
    assert old.drafter.load_tree is None
    assert old.drafter.aspects is not None and old.drafter.aspects(old, config.drafter, build) == [7, 3, "float32"]
    assert old.rule.build is not None
    assert old.rule.build(old, config.acceptance, build) == (7, "old", "cpu", 4, "seeds")
    assert old.graph.build(old, config.graph, build) == (7, "old", "cpu", 4)
    assert old.catchup.make() == "pruned"


def test_an_old_row_refuses_as_any(old: Chosen) -> None:
    config: RunConfig = old.config
    config.drafter.offset = 9  # type: ignore[attr-defined]
    assert "drafter.offset is large; use drafter.offset=0" in refusals(config)


def test_an_extension_may_import_all_that_is_named_and_no_name_is_named_twice() -> None:
    """What a type checker sees and what is imported when it is asked for are the same names."""
    assert extend.__file__ is not None
    tree = ast.parse(Path(extend.__file__).read_text())
    [seen] = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {
        (node.module, alias.name) for node in seen.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert typed == {(module, name) for module, names in extend.WITH_TORCH.items() for name in names}
    for module, name in typed:
        assert getattr(extend, name) is getattr(importlib.import_module(str(module)), name)
    with pytest.raises(AttributeError, match="no_such_name"):
        extend.no_such_name  # noqa: B018
