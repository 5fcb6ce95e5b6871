"""The base of each group of options: every key that all options of a group have.

The keys of one option are in its class in `spec_lab.options`. A base also says, as class variables, what the lab must
know of an option without asking for its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import MISSING

from spec_lab.config.choices import Unusable, WeightDtype, Weights
from spec_lab.config.option import Part, knob, option
from spec_lab.core.errors import UserError

if TYPE_CHECKING:
    from spec_lab.acceptance.deterministic import DraftJudge
    from spec_lab.build.lab import Lab
    from spec_lab.config.run import Run
    from spec_lab.core.kernel_set import KernelSet
    from spec_lab.core.layer_protocols import AttentionBackend
    from spec_lab.core.protocols import AcceptanceRule, Drafter
    from spec_lab.core.types import Request
    from spec_lab.drafters.growth import TreeShape
    from spec_lab.engine.graphs.mode import GraphMode
    from spec_lab.record.recorder import Sink
    from spec_lab.record.verify_rows import RowsOrigin
    from spec_lab.workloads.tokenizer import Tokenizer

MAX_DRAFT_TOKENS = 16


@dataclass
class TargetConfig(Part):
    """The model whose decoding is to become faster."""

    num_threads: ClassVar[int | None] = None
    """CPU threads if `num_threads=null`, except with kernels=native; None is all cores, shared by the processes."""

    name: str = MISSING
    weights: Weights = knob(Weights.checkpoint, "where the weights come from")
    weight_dtype: WeightDtype = knob(
        WeightDtype.auto,
        "type in which the layers' weights are stored; fp8, int4 and mxfp4 leave embedding, head and drafter in dtype",
    )
    thinking_begin: str | None = knob(
        None, "token that begins thinking, as text or id; null is the chat template's, or a known one (docs/use.md)"
    )
    thinking_end: str | None = knob(None, "token that ends thinking; like thinking_begin")
    tensor_parallel: int = knob(1, "number of torchrun processes that the layers are split over", least=1)

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint, or its GGUF file; UserError if there is none."""
        raise NotImplementedError

    def files(self, run: Run) -> list[Path]:
        return [self.folder]


@dataclass
class DrafterConfig(Part):
    """The keys that every drafter has.

    Class variables:
        drafts: whether it proposes tokens; False is plain decoding.
        drafts_trees: whether `build` makes a drafter of branches in a run with a tree.
        drafts_on_host: whether it drafts on the host between two rounds, as many tokens as it finds.
        notes_confidence: whether it stores its confidences where `Lab.confidences` says, as the lab's pickers do.
        hands_hidden_on: whether a draft step reads `state.hidden`, and replaces only this and `state.tokens`.
        ingests_in_graphs: whether `ingest` may be captured for a prompt that comes alone, since it reads no spans.
        one_pass: whether one pass makes all drafts, so that there is no draft step to replay.
        tells_offers: whether a round is known to have offered no draft, where none was found.
        follows_greedy_text: why its drafts fit only plain greedy decoding's output; None if they fit any.
    """

    drafts: ClassVar[bool] = True
    drafts_trees: ClassVar[bool] = False
    drafts_on_host: ClassVar[bool] = False
    notes_confidence: ClassVar[bool] = False
    hands_hidden_on: ClassVar[bool] = False
    ingests_in_graphs: ClassVar[bool] = False
    one_pass: ClassVar[bool] = False
    tells_offers: ClassVar[bool] = True
    follows_greedy_text: ClassVar[str | None] = None

    name: str = MISSING
    num_draft_tokens: int = knob(
        3,
        "draft tokens a round, K; a round of a chain verifies at most K + 1 rows a request",
        least=1,
        most=MAX_DRAFT_TOKENS,
    )
    plan: str = knob("none", "what decides how many drafts a round verifies and makes, at most num_draft_tokens")

    def build(self, lab: Lab) -> Drafter[Any]:
        """Make the drafter of one engine."""
        raise NotImplementedError

    def rows_written(self, run: Run) -> int:
        """Return how many positions past the last token a round may write."""
        return 2 * self.num_draft_tokens


@dataclass
class AcceptanceConfig(Part):
    """The keys that every acceptance rule has.

    Class variables:
        greedy_only: why it needs sampling.temperature=0; None if it does not.
        keeps_greedy_text: whether its output is plain greedy decoding's, token for token, whatever is drafted.
        keeps_the_law: whether the output follows the target's distribution exactly.
        takes_fewer_drafts: whether it accepts only drafts that are offered (`AcceptanceInputs.num_drafts`).
        judges_trees: whether `build` makes a rule for trees in a run with a tree.
    """

    greedy_only: ClassVar[str | None] = None
    keeps_greedy_text: ClassVar[bool] = False
    keeps_the_law: ClassVar[bool] = False
    takes_fewer_drafts: ClassVar[bool] = False
    judges_trees: ClassVar[bool] = False

    name: str = MISSING

    def build(self, lab: Lab) -> AcceptanceRule:
        """Make the rule of one engine."""
        raise NotImplementedError

    def judge(self, origin: RowsOrigin) -> DraftJudge:
        """Make a rule that judges recorded rows of this origin without drawing, as the built one does at temperature 0.

        Raises:
            UserError: the rule draws, or has no such method.
        """
        raise UserError(
            f"acceptance={self.name} draws or has no `judge`: recorded rows need one; use acceptance=strict"
        )


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


@option("tree", "none")
class TreeConfig(Part):
    """tree=none: a round's drafts are a chain. Options with trees have additional keys."""

    name: str = "none"

    @property
    def sizes(self) -> TreeSizes | None:
        """The sizes of the tree; None for a chain."""
        return None

    def build(self, lab: Lab) -> TreeShape[Any]:
        """Make what decides which drafts are in the tree."""
        raise NotImplementedError


@dataclass
class GraphConfig(Part):
    """The keys that every graph mode has.

    Class variables:
        captures: whether anything is captured.
        runs_trees: whether draft steps may differ in their number of rows, as those of a tree do.
        overlap, rounds_per_replay: as the knobs of graph=round.
    """

    captures: ClassVar[bool] = True
    runs_trees: ClassVar[bool] = True
    overlap = False
    rounds_per_replay = 1

    name: str = MISSING

    def build(self, lab: Lab) -> GraphMode:
        """Make the mode of one engine."""
        raise NotImplementedError


@dataclass
class AttentionConfig(Part):
    """The keys that every attention backend has; `masks_trees` says whether `build` can mask the rows of trees."""

    masks_trees: ClassVar[bool] = True

    name: str = MISSING

    def build(self, run: Run, kernels: KernelSet, max_positions: int) -> AttentionBackend:
        """Make the backend, which all engines of a run share. No sequence has more than `max_positions`, with those
        that a round writes past its end."""
        raise NotImplementedError


@dataclass
class WorkloadConfig(Part):
    """The keys that every workload has.

    Class variables:
        reads_text: whether prompts are text, which the target's tokenizer turns into ids.
    """

    reads_text: ClassVar[bool] = True

    name: str = MISSING
    limit: int | None = knob(None, "number of prompts, taken from the categories in turn; null is all of them", least=1)
    categories: list[str] | None = knob(None, "categories to take prompts from; null is all of them")
    by_category: bool = knob(False, "ask one category after the other, so that a batch is mostly of one")
    system: str | None = knob(None, "system prompt of chats whose line has none; null means none")
    thinking: bool | None = knob(
        None, "whether the model is to think: the switch of its chat template; null leaves it to the template"
    )
    unusable: Unusable = knob(
        Unusable.refuse, "what happens if a line of the file is broken, or a prompt is too long for the target"
    )
    checker: str = knob("answer", "how the answer is read from an output; a prompt of a file may name its own")
    ignore_eos: bool = knob(False, "continue after the end-of-sequence token, up to max_new_tokens")
    request_rate: float | None = knob(
        None, "requests that arrive per second; null lets the next one arrive as soon as a slot is free", above=0
    )
    burstiness: float = knob(
        1.0, "shape of the gaps between arrivals: 1 is a Poisson process, less is burstier", above=0
    )
    duration: float | None = knob(None, "seconds after which no request arrives; needs request_rate", above=0)
    max_in_flight: int | None = knob(
        None, "most requests that have arrived and not ended, beyond which none arrives; null is no bound", least=1
    )
    stop: list[str] | None = knob(None, "texts that end an output; a line of a file may have its own `stop`")
    stop_token_ids: list[int] | None = knob(None, "tokens that end an output; a line may have its own `stop_token_ids`")

    def load(self, run: Run, tokenizer: Tokenizer) -> list[Request]:
        """Return the requests."""
        raise NotImplementedError


@dataclass
class LoggerConfig(Part):
    """The keys that every logger has."""

    name: str = MISSING

    def join_sweep(self, sweep: str) -> None:
        """Note that the run is a job of a sweep, whose folder has this name."""

    def sinks(self) -> list[Sink]:
        """Return further places for records, in addition to the files."""
        return []


@option("engine", "lab")
class EngineConfig(Part):
    """engine=lab: the lab itself decodes. Other engines do so in processes of their own (`spec_lab.engines`)."""

    lasting: ClassVar[bool] = True
    """Whether a finished job stands for another one of the same configuration and files."""

    name: str = "lab"
