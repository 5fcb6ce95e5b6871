"""Registry entries ("rows") of options, with a class for each kind: all that the lab must know to build an option.

An option's help line and preset values are not here but in its YAML file under `conf/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_lab.core.pruning_protocols import Drop
from spec_lab.menu.config import (
    AcceptanceConfig,
    AttentionConfig,
    DrafterConfig,
    GraphConfig,
    LoggerConfig,
    RunConfig,
    TargetConfig,
    TreeConfig,
    WorkloadConfig,
)

if TYPE_CHECKING:
    from spec_lab.acceptance.deterministic import DeterministicRule, DraftJudge
    from spec_lab.core.layer_protocols import AttentionBackend
    from spec_lab.core.protocols import AcceptanceRule
    from spec_lab.core.pruning_protocols import CatchupPruning, PromptPruning
    from spec_lab.core.tree_protocols import TreeRule
    from spec_lab.drafters.growth import TreeShape
    from spec_lab.engine.graphs.mode import GraphMode
    from spec_lab.menu.readings import Aspect
    from spec_lab.record.recorder import Sink

Refusal = Callable[[RunConfig], str | None]
"""Checks a run that chose the option: returns None, or a line that names the knob and the remedy. It imports no
torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The fields that every option has.

    Attributes:
        name: what the user types after `GROUP=`, or as the value of its knob.
        refusals: checks for settings that the option does not support; called only for runs that chose it.
    """

    name: str
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOption(Option):
    """`target=`.

    Attributes:
        folder: where the checkpoint is.
        num_threads: number of CPU threads if `num_threads=null`, except with kernels=native; None means all cores,
            divided among the processes of the run.
    """

    schema: type[TargetConfig] = TargetConfig
    folder: Callable[[TargetConfig], Path]
    num_threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOption(Option):
    """`drafter=`.

    Attributes:
        load: takes (the `Chosen` run, its `drafter` part, `DrafterBuild`), reads the weights, and returns a
            `DrafterFactory`.
        folder: takes (config, its `drafter` part) and returns the folder of the weights; None if there are none.
        aspects: takes (the `Chosen` run, its `drafter` part, `DrafterBuild`) and returns a list of
            `menu.readings.Aspect`, the choices that the doctor also tries in other ways; None if there are no such
            choices.
        drafts: whether it proposes tokens; False is plain decoding, with no draft tokens to count.
        follows_greedy_text: why its drafts fit only the output of plain greedy decoding, as in "replays a greedy
            continuation"; None if they fit any output.
        hands_hidden_on: whether a draft step reads `state.hidden`, and replaces only this and `state.tokens`; the
            doctor then measures how much the hidden state helps.
        no_loop: why there is no draft loop to capture, so that graph modes that capture are refused; None if they are
            accepted.
        no_moves: why no metadata is updated between draft steps; None if metadata is updated there.
        load_tree: like `load`, for a drafter that drafts the branches of a tree; None if it drafts chains only.
        no_branch_keys: whether the branches of a tree write no keys, so that no branch can see another's.
        drafts_on_host: whether it makes drafts on the host between two rounds, as many as it finds.
        ingests_in_graphs: whether its `ingest` may be captured for a prompt that comes alone, since it reads no spans.
        notes_confidence: whether it stores its confidence if a run uses it, as `wiring.drafting.make_picker` does.
        preset_of: the option that this one is a preset of, with other values but the same code; None if it is not one.
        rows_written: returns, from a run's configuration, how many positions past the last token a round may write;
            None for a drafter with which these are never more than 2K.
    """

    schema: type[DrafterConfig]
    load: Callable[..., Any]
    folder: Callable[..., Path] | None = None
    aspects: Callable[..., list[Aspect]] | None = None
    drafts: bool = True
    follows_greedy_text: str | None = None
    hands_hidden_on: bool = False
    no_loop: str | None = None
    no_moves: str | None = None
    load_tree: Callable[..., Any] | None = None
    no_branch_keys: bool = False
    notes_confidence: bool = False
    ingests_in_graphs: bool = False
    drafts_on_host: bool = False
    preset_of: str | None = None
    rows_written: Callable[[RunConfig], int] | None = None


MAX_ROWS, MAX_TOPK, MAX_DEPTH = 64, 16, 16
"""The upper bounds of a tree's sizes."""


@dataclass(frozen=True, slots=True)
class TreeSizes:
    """The fixed sizes of a tree, whatever tokens are in it.

    Attributes:
        depth: number of drafts on its longest path, which is used as K: a round emits 1..depth + 1 tokens.
        num_rows: number of rows in verify for each request: the pending token, which is the root, and the drafts.
        topk: number of likeliest continuations that are considered for each drafted token.
        width: number of rows for each request in the widest draft step.
        spine: number of drafts on the path of likeliest tokens, which the doctor drafts as a chain. A static tree
            contains them all; a dynamic tree may leave out the last ones.
    """

    depth: int
    num_rows: int
    topk: int
    width: int
    spine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOption(Option):
    """`tree=`.

    Attributes:
        sizes: takes the `tree` part and returns the sizes of the tree; None for a chain.
        make: takes the `tree` part and `DrafterBuild`, and returns the object that decides which drafts are in the
            tree.
        noting: takes the result of `make` and `RowConfidences`, and returns such an object that also stores how likely
            its rows are; None if all rows of a tree are always used.
    """

    schema: type[TreeConfig] = TreeConfig
    sizes: Callable[[Any], TreeSizes] | None = None
    make: Callable[..., TreeShape[Any]] | None = None
    noting: Callable[..., TreeShape[Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOption(Option):
    """`acceptance=`: either `judge` or `build` makes the rule.

    Attributes:
        judge: takes (the `acceptance` part, `RuleContext`) and makes a rule that decides without drawing; such a rule
            can also judge a recorded run again.
        build: takes (the `Chosen` run, its `acceptance` part, `RuleBuild`) and makes a rule that draws, or needs these
            arguments; it cannot judge a recorded run again, unless it has `judge_again`.
        judge_again: takes the arguments of `judge`, and makes a rule for recorded runs. It judges as the built rule
            does at temperature 0, without drawing; None for a rule that always draws.
        greedy_only: why it needs sampling.temperature=0, as in "compares with the argmax"; None if it does not.
        keeps_greedy_text: whether its output is plain greedy decoding's, token for token, whatever is drafted.
        walk: makes the rule's form for a tree of drafts, from (the `Chosen` run, its `acceptance` part, `RuleBuild`);
            None if it judges chains only.
        takes_fewer_drafts: whether it only accepts drafts that are offered (`AcceptanceInputs.num_drafts`), and emits
            the target's own token after the last of them.
        keeps_the_law: takes the `acceptance` part and returns whether the output follows the target's distribution
            exactly; without this function a rule is assumed to change it.
    """

    schema: type[AcceptanceConfig]
    judge: Callable[..., DeterministicRule] | None = None
    build: Callable[..., AcceptanceRule] | None = None
    judge_again: Callable[..., DraftJudge] | None = None
    greedy_only: str | None = None
    keeps_greedy_text: bool = False
    walk: Callable[..., TreeRule] | None = None
    takes_fewer_drafts: bool = False
    keeps_the_law: Callable[[Any], bool] = lambda acceptance: False

    def __post_init__(self) -> None:
        assert (self.judge is None) != (self.build is None), "one of judge and build makes the rule"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPruningOption(Option):
    """A value of `prune.prefill`; `make` takes nothing."""

    make: Callable[[], PromptPruning]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchupPruningOption(Option):
    """A value of `prune.catchup`; `make` takes nothing.

    Attributes:
        drop: see `PrunePolicy.drop`.
    """

    make: Callable[[], CatchupPruning]
    drop: Drop | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOption(Option):
    """`graph=`; `build` takes (the `Chosen` run, its `graph` part, `GraphBuild`).

    Attributes:
        num_launched: number of draft steps in a round that run in Python, uncaptured; None if the mode captures
            nothing.
        runs_trees: whether draft steps may differ in their number of rows, as those of a tree do.
    """

    schema: type[GraphConfig]
    build: Callable[..., GraphMode]
    num_launched: int | None = 0
    runs_trees: bool = False

    @property
    def captures(self) -> bool:
        """Return whether anything is captured."""
        return self.num_launched is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOption(Option):
    """`attention=`; `make` takes a `BackendContext` and returns a backend, and `make_for_trees` returns one that masks
    the rows of trees, or is None if there is none."""

    schema: type[AttentionConfig] = AttentionConfig
    make: Callable[..., AttentionBackend]
    make_for_trees: Callable[..., AttentionBackend] | None = None
    needs_triton: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOption(Option):
    """`workload=`; `load` takes (config, tokenizer) and returns the requests.

    Attributes:
        reads: the knobs of the group that it requires, each with an example value.
        has_categories: whether there are categories to choose from.
        reads_text: whether prompts are text, which the target's tokenizer turns into ids.
    """

    schema: type[WorkloadConfig] = WorkloadConfig
    load: Callable[..., list[Any]]
    reads: Mapping[str, str] = field(default_factory=dict)
    has_categories: bool = True
    reads_text: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckerOption(Option):
    """A value of `workload.checker`.

    Attributes:
        read: takes a reply without its thinking and returns the answer in it; None if there is none.
        same: takes the expected answer and the one that was read, and returns whether they are the same.
        expects: takes the expected answer, and returns whether `read` can return it at all.
    """

    read: Callable[[str], str | None]
    same: Callable[[str, str], bool]
    expects: Callable[[str], bool] = lambda expected: True


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerOption(Option):
    """`logger=`; `sinks` takes the `logger` part and returns further places for records, in addition to the files."""

    schema: type[LoggerConfig] = LoggerConfig
    sinks: Callable[[LoggerConfig], list[Sink]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricOption(Option):
    """A number that an extension defines. It is computed in every run that loads the extension, without being chosen.

    Attributes:
        definition: a sentence about the number, for records and reports.
        unit: such as `ms`; empty for a count.
        of_round: takes a `RoundRecord` and returns a number; the run's number is then the mean over rounds.
        of_run: takes a `GenerationResult`, a timed turn, and returns its number; the run's is the median over turns.
            Used instead of `of_round`.
    """

    definition: str
    of_round: Callable[[Any], float | None] | None = None
    of_run: Callable[[Any], float | None] | None = None
    unit: str = ""
