"""The row of an option: all that the lab must know of it, a class for each kind of part.

Help lines and presets are not here: they stand in the option's YAML under `conf/`.
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
    from spec_lab.record.sinks import Sink

Refusal = Callable[[RunConfig], str | None]
"""Looks at a run that chose the option: None, or one line that names the knob and the remedy. It imports no torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The fields that every option has.

    Attributes:
        name: as it is typed behind `GROUP=`, or as the value of its knob.
        refusals: what the option cannot do or be combined with; asked only of runs that chose it.
    """

    name: str
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOption(Option):
    """`target=`.

    Attributes:
        folder: where the checkpoint lies.
        num_threads: CPU threads where `num_threads=null`; None is every core.
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
        folder: takes (config, its `drafter` part) and returns the folder of the weights; None where there are none.
        aspects: takes (the `Chosen` run, its `drafter` part, `DrafterBuild`) and returns what the doctor reads in other
            ways, a list of `menu.readings.Aspect`; None where weights have one reading.
        drafts: it proposes tokens; False is plain decoding, with no draft tokens to count.
        follows_greedy_text: why its drafts fit only an output that is plain greedy decoding's, as in "replays a greedy
            continuation"; None where they fit any.
        hands_hidden_on: a draft step reads and replaces `state.tokens` and `state.hidden`, and nothing else of its
            state; the doctor then asks what the hidden state is good for.
        no_loop: why there is no draft loop to capture, as in "looks its drafts up"; None where there is one.
        no_moves: why no metadata moves between draft steps; None where it does.
        load_tree: as `load`, for a drafter that drafts the branches of a tree; None where it drafts chains only.
        no_branch_keys: the branches of a tree write no keys, so that none can see those of another.
        drafts_on_host: it makes drafts on the host between two rounds, as many as it finds.
        ingests_in_graphs: its `ingest` may be captured for a prompt that comes alone, since it reads no spans.
        notes_confidence: it picks its drafts with `wiring.drafting.make_picker`, which notes how sure it is of them.
        preset_of: the option whose parts it is other values of, in everything the same; None where it is its own.
        rows_written: counts from a run's configuration the rows that a round writes behind L, where those may be more
            than 2K; None where they are not.
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
"""The bounds of a tree's sizes."""


@dataclass(frozen=True, slots=True)
class TreeSizes:
    """The fixed sizes of a tree, whatever tokens are in it.

    Attributes:
        depth: drafts on its longest path, which stand for K: a round emits 1..depth + 1 tokens.
        num_rows: rows a request that verify runs: the pending token, which is the root, and the drafts.
        topk: likeliest continuations that are looked at of a drafted token.
        width: rows a request of the widest draft step.
        spine: drafts on the path of likeliest ones, as far as a tree is bound to have a place for them.
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
        sizes: takes the `tree` part, and says how large the tree is; None for a chain.
        make: takes the `tree` part and `DrafterBuild`, and makes what decides which drafts are in the tree.
        noting: takes what `make` made and `RowConfidences`, and makes the same of it, which notes how likely its rows
            are; None where a tree's rows all count.
    """

    schema: type[TreeConfig] = TreeConfig
    sizes: Callable[[Any], TreeSizes] | None = None
    make: Callable[..., TreeShape[Any]] | None = None
    noting: Callable[..., TreeShape[Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOption(Option):
    """`acceptance=`: either `judge` or `build` makes the rule.

    Attributes:
        judge: takes (the `acceptance` part, `RuleContext`) and makes a rule that decides without drawing; such
            a rule can also judge a recorded run again.
        build: takes (the `Chosen` run, its `acceptance` part, `RuleBuild`) and makes a rule that draws or needs
            those; it cannot judge a recorded run again, unless it has `judge_again`.
        judge_again: takes what `judge` takes, and makes what judges a recorded run as a built rule does at temperature
            0, where it draws nothing; None for a rule that always draws.
        greedy_only: why it needs sampling.temperature=0, as in "compares with the argmax"; None where it does not.
        keeps_greedy_text: its output is plain greedy decoding's, token for token, whatever is drafted.
        walk: makes the rule's form for a tree of drafts, from (the `Chosen` run, its `acceptance` part,
            `RuleBuild`); None where it judges chains only.
        takes_fewer_drafts: it accepts no draft that `AcceptanceInputs.num_drafts` says is not offered, and puts the
            target's own token in its place.
        keeps_the_law: says of its `acceptance` part whether the output follows the target's law exactly; a rule that
            does not say is taken to change it.
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
        num_launched: draft steps a round that are launched from Python; None where none is captured.
        runs_trees: draft steps may differ in their number of rows, as those of a tree do.
    """

    schema: type[GraphConfig]
    build: Callable[..., GraphMode]
    num_launched: int | None = 0
    runs_trees: bool = False

    @property
    def captures(self) -> bool:
        """Tells whether anything is captured."""
        return self.num_launched is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOption(Option):
    """`attention=`; `make` takes a `BackendContext`, and so does `make_for_trees`, of a backend that masks the rows of
    trees; None where there is none."""

    schema: type[AttentionConfig] = AttentionConfig
    make: Callable[..., AttentionBackend]
    make_for_trees: Callable[..., AttentionBackend] | None = None
    needs_triton: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOption(Option):
    """`workload=`; `load` takes (config, tokenizer) and returns the requests.

    Attributes:
        reads: the knobs of the group that it cannot do without, with a value to begin with.
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
        read: takes a reply, without its thinking, and returns the answer in it; None where there is none.
        same: takes the answer expected and the one read, and tells whether they are the same.
        expects: takes the answer expected, and tells whether `read` can come to it at all.
    """

    read: Callable[[str], str | None]
    same: Callable[[str, str], bool]
    expects: Callable[[str], bool] = lambda expected: True


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerOption(Option):
    """`logger=`; `sinks` takes the `logger` part and returns where records go beside the files."""

    schema: type[LoggerConfig] = LoggerConfig
    sinks: Callable[[LoggerConfig], list[Sink]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricOption(Option):
    """A figure of an extension's own, which every run has that names the extension: nothing chooses it.

    Attributes:
        definition: what it is, in a sentence, for records and reports.
        of_round: takes a `RoundRecord`; the run's figure is then the mean over rounds.
        of_run: takes a `GenerationResult`, a timed pass, and gives the run's figure in its place.
    """

    definition: str
    of_round: Callable[[Any], float | None] | None = None
    of_run: Callable[[Any], float | None] | None = None
