"""The subject of the checks: the requested run, loaded once, and the target's own text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.core.errors import UserError
from spec_lab.core.results import RequestRecord
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.engine.teacher import TeacherForcing
from spec_lab.menu.choices import ByRequest, DraftSampling, DraftStop
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import RunConfig, SamplingConfig, TreeConfig, VerifyConfig
from spec_lab.options.graphs.eager import EagerGraphConfig
from spec_lab.options.plain import plain_config
from spec_lab.options.rules.strict import StrictAcceptanceConfig
from spec_lab.wiring.drafting import DrafterFactory, load_drafter
from spec_lab.wiring.engine import build_engine, build_teacher
from spec_lab.wiring.limits import Limits, engine_limits
from spec_lab.wiring.models import DrafterBuild, TargetBuild, load_models
from spec_lab.wiring.workloads import open_workload
from spec_lab.workloads.thinking import thinking_markers

# This gives enough rounds to tell a relevant difference from chance, in a short time.
MAX_REQUESTS = 9
MAX_NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Subject:
    """A run that is examined.

    Attributes:
        chosen: the run with strict greedy acceptance, for which a draft is either correct or wrong.
        requests: the first few of the workload, cut short.
        limits: limits of the run's engine.
        make_drafter: makes the drafter of the run's engine.
        plain: plain decoding's outputs for the requests, which are the target's own text.
        max_rounds: the most rounds of the loop that a check drafts again.
    """

    chosen: Chosen
    models: TargetBuild
    requests: list[Request]
    limits: Limits
    make_drafter: DrafterFactory
    plain: list[RequestRecord]
    max_rounds: int = 144

    @property
    def config(self) -> RunConfig:
        return self.chosen.config

    @property
    def num_draft_tokens(self) -> int:
        return self.of_spine.config.drafter.num_draft_tokens

    @property
    def of_spine(self) -> Chosen:
        """The same run with a chain of drafts. For a tree the chain is its spine, the likeliest drafts."""
        sizes = self.chosen.sizes
        if sizes is None:
            return self.chosen
        drafter = dataclasses.replace(self.config.drafter, num_draft_tokens=sizes.spine)
        return self.chosen.again(dataclasses.replace(self.config, drafter=drafter, tree=TreeConfig()))

    @property
    def reference_build(self) -> DrafterBuild:
        """The parts for drafters that attend with the reference backend, whatever the run's backend is."""
        target = self.models.target
        reference = TorchAttention(self.config.cache.page_size, target.num_positions)
        return dataclasses.replace(self.models.of_drafters, backend=reference)

    def engine(self, chosen: Chosen, make_drafter: DrafterFactory) -> Engine:
        """Make an engine of the run's sizes. A drafter that replays outputs gets those of plain decoding."""
        engine = build_engine(chosen, self.models, make_drafter, self.limits)
        teach(engine.parts.drafter, self.plain)
        return engine

    def greedy_teacher(self) -> TeacherForcing:
        """Make teacher forcing with the run's target."""
        return build_teacher(self.config, self.models, self.limits)


def teach(drafter: Any, plain: list[RequestRecord]) -> None:
    """Give plain decoding's outputs to a drafter that replays outputs."""
    learn = drafter.requirements.learn_continuations
    if learn is not None:
        learn({record.request_id: record.output_ids for record in plain})


def load_subject(chosen: Chosen) -> Subject:
    """Load target and drafter, and decode the target's own text.

    Raises:
        UserError: the tree has no spine, or a checkpoint, its logits, a prompt set or a size is invalid.
    """
    if chosen.sizes is not None and chosen.sizes.spine == 0:
        raise UserError("tree.paths without [0]: the doctor examines the path of the likeliest drafts; add [0]")
    chosen = chosen.again(strict_greedy(chosen.config))
    config = chosen.config
    torch.manual_seed(config.seed)
    tokenizer, workload = open_workload(chosen)
    requests = [shortened(request) for request in workload[:MAX_REQUESTS]]
    limits = engine_limits(chosen, requests, config.drafter.num_draft_tokens)
    models = load_models(chosen, limits.max_seq_len, thinking_markers(tokenizer, config.target))
    make_drafter = load_drafter(chosen, models.of_drafters)
    # The text is decoded with graph=eager, so that faults of a graph mode do not affect the text that judges it.
    alone = chosen.again(dataclasses.replace(plain_config(config), graph=EagerGraphConfig()))
    plain_engine = build_engine(alone, models, load_drafter(alone, models.of_drafters), limits)
    plain = plain_engine.generate(requests).requests
    subject = Subject(chosen, models, requests, limits, make_drafter, plain)
    teacher = subject.greedy_teacher()
    for record in plain:
        teacher.require_finite([*record.prompt_ids, *record.output_ids[:-1]])
    return subject


def strict_greedy(config: RunConfig) -> RunConfig:
    """Return the same run with greedy drafts, all K of them in every round, strict greedy acceptance, and a look by the
    host after each round."""
    every_draft = {
        "draft_sampling": DraftSampling.greedy,
        "stop": DraftStop.none,
        "k_schedule": None,
        "by_request": ByRequest.same,
    }
    return dataclasses.replace(
        config,
        drafter=_changed(config.drafter, every_draft),
        graph=_changed(config.graph, {"rounds_per_replay": 1, "skip_ended": False}),
        acceptance=StrictAcceptanceConfig(),
        sampling=SamplingConfig(),
        verify=VerifyConfig(),
    )


def _changed(options: Any, values: Mapping[str, Any]) -> Any:
    """Return the options with `values` in those of the keys that they have."""
    names = {field.name for field in dataclasses.fields(options)}
    return dataclasses.replace(options, **{name: value for name, value in values.items() if name in names})


def shortened(request: Request) -> Request:
    """Return the request with an output of at most `MAX_NEW_TOKENS`, to save time."""
    return dataclasses.replace(request, max_new_tokens=min(request.max_new_tokens, MAX_NEW_TOKENS))
