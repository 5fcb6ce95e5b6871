"""The subject of the checks: the requested run, loaded once, and the target's own text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.build.auto import with_auto_chosen
from spec_lab.build.engine import DrafterMaker, build_engine, build_teacher
from spec_lab.build.limits import Limits, engine_limits
from spec_lab.build.models import Last, Models, load_models
from spec_lab.build.workloads import open_workload
from spec_lab.config.choices import DraftSampling
from spec_lab.config.groups import TreeConfig
from spec_lab.config.option import get
from spec_lab.config.run import Run, SamplingConfig
from spec_lab.core.errors import UserError
from spec_lab.core.results import RequestRecord
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.engine.teacher import TeacherForcing
from spec_lab.measure.lab import plain_config
from spec_lab.workloads.thinking import thinking_markers

# This gives enough rounds to tell a relevant difference from chance, in a short time.
MAX_REQUESTS = 9
MAX_NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Subject:
    """A run that is examined.

    Attributes:
        config: the run with strict greedy acceptance, for which a draft is either correct or wrong.
        requests: the first few of the workload, cut short.
        limits: limits of the run's engine.
        reference: the same models, for drafters that attend with the reference backend, whatever the run's backend is.
        plain: plain decoding's outputs for the requests, which are the target's own text.
        max_rounds: the most rounds of the loop that a check drafts again.
    """

    config: Run
    models: Models
    reference: Models
    requests: list[Request]
    limits: Limits
    plain: list[RequestRecord]
    max_rounds: int = 144

    @property
    def num_draft_tokens(self) -> int:
        return self.of_spine.drafter.num_draft_tokens

    @property
    def of_spine(self) -> Run:
        """The same run with a chain of drafts. For a tree the chain is its spine, the likeliest drafts."""
        sizes = self.config.sizes
        if sizes is None:
            return self.config
        drafter = dataclasses.replace(self.config.drafter, num_draft_tokens=sizes.spine)
        return dataclasses.replace(self.config, drafter=drafter, tree=TreeConfig())

    @property
    def drafter_folder(self) -> Path:
        """The folder of the drafter's weights; the drafter must have some."""
        drafter: Any = self.config.drafter
        folder: Path = drafter.folder(self.config)
        return folder

    def engine(self, run: Run, make_drafter: DrafterMaker | None = None) -> Engine:
        """Make an engine of the run's sizes. A drafter that replays outputs gets those of plain decoding."""
        engine = build_engine(run, self.models, self.limits, make_drafter)
        drafter: Any = engine.parts.drafter
        if drafter.requirements.learns_continuations:
            drafter.learn({record.request_id: record.output_ids for record in self.plain})
        return engine

    def greedy_teacher(self) -> TeacherForcing:
        """Make teacher forcing with the run's target."""
        return build_teacher(self.config, self.models, self.limits)


def load_subject(typed: Run) -> Subject:
    """Load target and drafter, and decode the target's own text.

    Raises:
        UserError: the tree has no spine, or a checkpoint, its logits, a prompt set or a size is invalid.
    """
    if typed.sizes is not None and typed.sizes.spine == 0:
        raise UserError("tree.paths without [0]: the doctor examines the path of the likeliest drafts; add [0]")
    config = with_auto_chosen(strict_greedy(typed))
    torch.manual_seed(config.seed)
    tokenizer, workload = open_workload(config)
    requests = [
        dataclasses.replace(request, max_new_tokens=min(request.max_new_tokens, MAX_NEW_TOKENS))
        for request in workload[:MAX_REQUESTS]
    ]
    limits = engine_limits(config, requests)
    models = load_models(config, limits.max_seq_len, thinking_markers(tokenizer, config.target))
    # The text is decoded with graph=eager, so that faults of a graph mode do not affect the text that judges it.
    eager = dataclasses.replace(plain_config(config), graph=get("graph", "eager")())
    plain = build_engine(eager, models, limits).generate(requests).requests
    attention: Any = TorchAttention(config.cache.page_size, models.target.num_positions)
    reference = dataclasses.replace(models, backend=attention, heads=Last())
    subject = Subject(config, models, reference, requests, limits=limits, plain=plain)
    teacher = subject.greedy_teacher()
    for record in plain:
        teacher.require_finite([*record.prompt_ids, *record.output_ids[:-1]])
    return subject


def strict_greedy(run: Run) -> Run:
    """Return the same run with greedy drafts, all K of them in every round, strict greedy acceptance, and a look by the
    host after each round."""
    every_draft = {"draft_sampling": DraftSampling.greedy, "plan": "none"}
    return dataclasses.replace(
        run,
        drafter=_changed(run.drafter, every_draft),
        graph=_changed(run.graph, {"rounds_per_replay": 1}),
        acceptance=get("acceptance", "strict")(),
        sampling=SamplingConfig(),
    )


def _changed(options: Any, values: Mapping[str, Any]) -> Any:
    """Return the options with `values` in those of the keys that they have."""
    names = {field.name for field in dataclasses.fields(options)}
    return dataclasses.replace(options, **{name: value for name, value in values.items() if name in names})
