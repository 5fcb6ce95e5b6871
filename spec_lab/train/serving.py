"""The lab as the trainer uses it: a target in the engine, drafters from the folders of their exports, and runs that
write texts.

It is the only file of the trainer that composes runs.
"""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import spec_lab
from spec_lab.build.auto import with_auto_chosen
from spec_lab.build.engine import build_engine
from spec_lab.build.limits import Limits, engine_limits
from spec_lab.build.models import Last, Models, load_models
from spec_lab.checkpoints.digest import target_digest
from spec_lab.config.checks import admit
from spec_lab.config.run import Run
from spec_lab.core.passes import Pass
from spec_lab.core.prompts import PromptPack
from spec_lab.core.ragged import whole_prompt
from spec_lab.core.results import RequestRecord
from spec_lab.core.types import DraftStep, Request
from spec_lab.drafters.picking import DraftedRows, DraftHead, GivenDrafts
from spec_lab.engine.engine import Engine
from spec_lab.train.config import TargetChoice, TextsConfig, TrainConfig
from spec_lab.train.data import Recorded, TextsOrigin, read_runs
from spec_lab.train.group import Processes
from spec_lab.workloads.chat_template import template_digest


def quoted(key: str, value: object) -> str:
    """Return an override that Hydra reads as exactly the text of `value`, such as a path with special characters."""
    escaped = str(value).replace("'", r"\'")
    return f"{key}='{escaped}'"


def words_of(target: TargetChoice) -> tuple[str, ...]:
    """Return the overrides of a run that choose this target."""
    return (f"target={target.name}", *(() if target.path is None else (quoted("target.path", target.path),)))


def target_path(target: TargetChoice) -> Path:
    """Return the folder or file of a target's checkpoint; UserError if a run would refuse it."""
    return admit(spec_lab.compose([*words_of(target), "drafter=none", "references=[]"]).config).target.folder


def origin_of(path: Path) -> TextsOrigin:
    """Return what the texts of a target depend on, whatever they were asked to think."""
    return TextsOrigin(target_digest(path), template_digest(path), None)


@contextmanager
def for_a_while() -> Iterator[None]:
    """Enclose a function that runs an engine for a while: then the training gets its threads and memory back."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        gc.collect()  # an engine and its graphs are a reference cycle
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def sampled_at(temperature: float) -> tuple[str, ...]:
    """Return the overrides of a run that samples at a temperature; none for greedy decoding."""
    rule = "acceptance=rejection", "acceptance.method=one_hot"
    return (f"sampling.temperature={temperature}", *rule) if temperature else ()


@for_a_while()
def write_texts(config: TrainConfig, prompts: Path | None, output: Path, device: torch.device) -> Path:
    """Let the target answer prompts of a JSON Lines file, or prompts that it writes itself first; return the folder of
    the run that holds prompts and answers.

    Raises:
        UserError: a run is refused.
    """
    knobs: TextsConfig = config.texts
    longest = knobs.max_prompt_tokens + knobs.max_new_tokens
    shared = [
        *words_of(config.target),
        *("drafter=none", "prune=prefill", "references=[]", "repeats=1", "warmup_requests=0", "profile_rounds=0"),
        *("record.audit=false", "row_invariant=false", f"device={device}", f"dtype={config.dtype}"),
        *(f"seed={config.seed}", f"batch_size={knobs.batch_size}", f"max_new_tokens={knobs.max_new_tokens}"),
        *(quoted("output_dir", output), f"cache.max_seq_len={longest}", "workload.unusable=skip"),
        *(() if knobs.thinking is None else (f"workload.thinking={str(knobs.thinking).lower()}",)),
    ]
    if device.type == "cuda":
        shared += ["graph=round", "graph.rounds_per_replay=16"]
    asked = ["workload=jsonl", quoted("workload.path", prompts or ""), f"workload.limit={knobs.num}"]
    if prompts is None:
        own = ["name=prompts", "workload=user_turns", f"workload.num_requests={knobs.num}"]
        written = spec_lab.run(spec_lab.compose([*shared, *own, *sampled_at(knobs.prompt_temperature)]))
        asked = ["workload=outputs", quoted("workload.path", written.folder)]
    return spec_lab.run(spec_lab.compose([*shared, "name=texts", *asked, *sampled_at(knobs.temperature)])).folder


def runs_of(
    config: TrainConfig, folder: Path, path: Path, device: torch.device, group: Processes
) -> tuple[list[Recorded], list[Recorded] | None]:
    """Return the runs to learn from and those to measure on. Without runs in `data` the first process makes one, which
    is found again after a plan, or if the training was killed."""
    origin, data = origin_of(path), config.data
    if data is None or Path(data).is_file():
        made, asked = folder / "work" / "data.json", [data, config.seed, dataclasses.asdict(config.texts)]
        if group.rank == 0 and not (made.exists() and json.loads(made.read_text())["asked"] == asked):
            prompts = None if data is None else prompts_of(Path(data), folder)
            written = write_texts(config, prompts, folder / "texts", device)
            made.parent.mkdir(parents=True, exist_ok=True)
            made.write_text(json.dumps({"asked": asked, "written": str(written)}))
        group.agree(0.0, device)  # the others wait here
        data = json.loads(made.read_text())["written"]
    runs = read_runs(data, origin)
    if config.held_out is None:
        return runs, None
    origin = dataclasses.replace(origin, thinking=runs[0].origin.thinking)
    return runs, read_runs(config.held_out, origin, are_learnt=False)


def prompts_of(file: Path, folder: Path) -> Path:
    """Return a JSON Lines file that `workload=jsonl` reads; other formats are converted by `datasets`."""
    if file.suffix == ".jsonl":
        return file
    from datasets import load_dataset

    rows = load_dataset(file.suffix.removeprefix("."), data_files=str(file), split="train")
    converted = folder / "work" / "prompts.jsonl"
    converted.parent.mkdir(parents=True, exist_ok=True)
    rows.to_json(converted)
    return converted


class Listener(GivenDrafts):
    """A picker that stores the head's logits for each draft, and returns the text's own token as the draft."""

    takes_likeliest = False

    def __init__(self, tokens: Tensor) -> None:
        """`tokens`: the tokens to return as drafts, in order."""
        self.said: list[Tensor] = []
        self._tokens = tokens

    def pick(self, head: DraftHead, hidden: Tensor, rows: DraftedRows, column: Tensor | None = None) -> Tensor:
        made: Any = head
        self.said.append(made.scored_tokens(hidden).logits)
        return self._tokens[len(self.said) - 1 : len(self.said)]


@dataclass(frozen=True, slots=True)
class Serving:
    """A target that is loaded once into the engine. Drafters are built for it from the folders of their exports.

    Attributes:
        words: the overrides of each run, except those of the drafter.
        longest: a request as long as the longest one.
        of_drafter: further overrides for a drafter that is loaded from a folder.
        _composed: the composed run of each drafter.
    """

    words: tuple[str, ...]
    models: Models
    num_draft_tokens: int
    longest: Request
    of_drafter: tuple[str, ...] = ()
    _composed: dict[str, Run] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        path: Path,
        device: torch.device,
        num_draft_tokens: int,
        max_tokens: int,
        *more: str,
        of_drafter: tuple[str, ...] = (),
    ) -> Serving:
        """Load the target from `path`, for sequences of up to `max_tokens`.

        `more` are further overrides of every run, and `of_drafter` those of the drafter in training.
        """
        words = (
            *("target=hf", quoted("target.path", path), f"device={device}"),
            *("references=[]", "prune=none", "graph=eager", *more),
        )
        longest = Request("longest", "", (0,) * (max_tokens // 2), max_tokens - max_tokens // 2)
        run = with_auto_chosen(admit(spec_lab.compose([*words, "drafter=none"]).config))
        models = load_models(run, max_tokens)
        return cls(words, models, num_draft_tokens, longest, of_drafter=of_drafter, _composed={"none": run})

    def engine(self, drafter: str, folder: Path | None = None) -> Engine:
        """Make an engine with the drafter in `folder`; None for a drafter without weights."""
        return build_engine(*self._run(drafter, folder))

    def decode(self, drafter: str, folder: Path | None, requests: Sequence[Request]) -> list[RequestRecord]:
        """Decode `requests` greedily, and return their records."""
        engine = self.engine(drafter, folder)
        parts: Any = engine.parts
        if parts.drafter.requirements.learns_continuations:
            plain = self.decode("none", None, requests)
            parts.drafter.learn({record.request_id: record.output_ids for record in plain})
        return engine.generate(list(requests)).requests

    def _run(self, drafter: str, folder: Path | None) -> tuple[Run, Models, Limits]:
        """Return what an engine of this drafter is built from."""
        if drafter not in self._composed:
            words = [*self.words, f"drafter={drafter}"]
            if drafter != "none":
                words.append(f"drafter.num_draft_tokens={self.num_draft_tokens}")
            if folder is not None:
                words += [quoted("drafter.path", folder), *self.of_drafter]
            self._composed[drafter] = with_auto_chosen(admit(spec_lab.compose(words).config))
        run = self._composed[drafter]
        models = self.models
        if folder is not None:
            option: Any = run.drafter
            run = dataclasses.replace(run, drafter=dataclasses.replace(option, path=str(folder)))
            models = dataclasses.replace(models, heads=Last())  # its weights are others each time, and are not kept
        limits = engine_limits(run, [self.longest] * run.batch_size)
        return run, models, limits

    @torch.inference_mode()
    def step_laws(self, engine: Engine, tokens: Tensor, prompt_length: int) -> Tensor:
        """Return the logits [K, draft_vocab] of an engine's drafter for its K drafts after a prompt.

        The drafter ingests the prompt. Then each draft step gets the text's own token instead of the previous draft.

        Args:
            tokens: [at least prompt_length + K] a text.
        """
        made: Any = engine.parts.drafter
        made.picker = heard = Listener(tokens[prompt_length + 1 :].to(self.models.device))
        state = made.ingest(self._prompt(engine, tokens, prompt_length))
        for step in range(1, self.num_draft_tokens):
            if state.attention is not None:  # None if draft steps do not advance the metadata
                engine.parts.backend.advance(state.attention)
            made.step(state, DraftStep(step, torch.tensor([step], device=self.models.device)))
        return torch.cat(heard.said)

    @torch.inference_mode()
    def slot_laws(self, engine: Engine, tokens: Tensor, prompt_length: int) -> Tensor:
        """Return the logits [K, vocab] of a block drafter for its K drafts after a prompt, each given the text's own
        tokens before it; -inf for tokens that its head does not score."""
        drafter: Any = engine.parts.drafter
        block = drafter.blocks.of_prompts(self._prompt(engine, tokens, prompt_length))
        head, said = drafter.blocks.head, []
        walk = head.begin(block.slots)
        for slot in range(self.num_draft_tokens):
            before = tokens[prompt_length + slot : prompt_length + slot + 1].to(self.models.device)
            law = head.scores(walk, before, torch.tensor([slot], device=self.models.device))
            said.append(law.target_logits(block.slots.hidden))
        return torch.cat(said)

    def _prompt(self, engine: Engine, tokens: Tensor, prompt_length: int) -> PromptPack:
        """Run a prompt through the target, and return the pack that the drafter ingests."""
        parts, chunk = engine.parts, tokens[: prompt_length + 1].to(self.models.device)
        pages = torch.arange(2, parts.cache.num_pages, device=chunk.device)
        table = torch.cat([pages, pages.new_ones(1)])[None]
        first = whole_prompt(parts.backend, table, chunk, None, self.num_draft_tokens)
        features = parts.drafter.requirements.features
        output = parts.target.forward(chunk[:-1], Pass(parts.cache, first.attention), features)
        return dataclasses.replace(first, features=output.features)
