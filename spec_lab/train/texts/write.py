"""Lets a target write many texts at a time. Its weights are loaded once, and each temperature gets an engine."""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from spec_lab.app.compose import compose
from spec_lab.build.limits import engine_limits
from spec_lab.build.models import TargetBuild, load_models, thinking_markers
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.config.checks import admit
from spec_lab.config.choices import Weights
from spec_lab.config.run import SamplingConfig
from spec_lab.core.errors import UserError
from spec_lab.core.results import RequestRecord
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.measure.lab import plain_engine, use_threads
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.devices import runs_on_cuda
from spec_lab.record.progress import SECONDS_BETWEEN_LINES
from spec_lab.train.texts.header import WrittenBy, digest_of_text, digest_of_weights
from spec_lab.train.texts.settings import FEWEST_PROMPT_TOKENS, TextsConfig
from spec_lab.workloads.chat_template import stored_template
from spec_lab.workloads.tokenizer import TargetTokenizer


def choose_target(words: Sequence[str], config: TextsConfig, prefix: str = "") -> Chosen:
    """Make the plain-decoding run that writes the texts, from overrides such as `target=hf target.path=DIR`.

    `prefix` is what a user types before the keys of `TextsConfig`. Refusals name the keys with it.

    Raises:
        UserError: a word is mistyped, the run is refused, or a text may be longer than the target's positions.
    """
    own = ["drafter=none", "prune=prefill", "references=[]", "row_invariant=false", f"batch_size={config.batch_size}"]
    named = {word.partition("=")[0] for word in words}
    device = next((word.partition("=")[2] for word in words if word.startswith("device=")), "auto")
    if "graph" not in named and runs_on_cuda(device):
        own += ["graph=round", f"graph.rounds_per_replay={config.rounds_per_replay}"]
    chosen = admit(compose([*own, f"seed={config.seed}", *words]).config)
    if chosen.config.target.weights == Weights.random:
        raise UserError("target.weights=random: no drafter can learn from texts of random weights; leave it out")
    positions = read_model_config(chosen.target_folder).max_position_embeddings
    if config.longest > positions:
        name = "max_new_tokens" if config.max_prompt_tokens < positions else "max_prompt_tokens"
        most = positions - config.longest + getattr(config, name)
        remedy = f"{prefix}{name}={most}"
        if name == "max_prompt_tokens" and most < FEWEST_PROMPT_TOKENS:
            fewest = FEWEST_PROMPT_TOKENS
            remedy = f"{prefix}{name}={fewest} {prefix}max_new_tokens={positions - fewest}"
        raise UserError(
            f"{prefix}max_prompt_tokens={config.max_prompt_tokens} and {prefix}max_new_tokens={config.max_new_tokens} "
            f"are more than the target's {positions} positions; use {remedy}"
        )
    cache = dataclasses.replace(chosen.config.cache, max_seq_len=config.longest)
    return chosen.again(dataclasses.replace(chosen.config, cache=cache, max_new_tokens=config.max_new_tokens))


@dataclass(slots=True)
class Writer:
    """Continues prompts with the target. Its engines share the weights; each has its own KV cache and graphs."""

    chosen: Chosen
    tokenizer: TargetTokenizer
    models: TargetBuild
    config: TextsConfig
    _engines: dict[float, Engine] = field(default_factory=dict)

    @classmethod
    def load(cls, chosen: Chosen, config: TextsConfig) -> Writer:
        """Load tokenizer and weights.

        Raises:
            UserError: the tokenizer or the weights are missing or cannot be used.
        """
        use_threads(chosen)
        tokenizer = TargetTokenizer(chosen.target_folder, config.thinking)
        return cls(chosen, tokenizer, load_models(chosen, config.longest, thinking_markers(tokenizer)), config)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a text."""
        return self.models.target.eos_token_ids

    def written_by(self) -> WrittenBy:
        """Identify the target: its name, digests of its files, and the size of its vocabulary."""
        folder = self.chosen.target_folder
        name = self.chosen.config.target.path or self.chosen.config.target.name
        template = digest_of_text(stored_template(folder))
        vocab_size = self.models.target.config.vocab_size
        return WrittenBy(Path(name).name, digest_of_weights(folder), self.tokenizer.digest(), template, vocab_size)

    def write(self, requests: list[Request], temperature: float, progress: TextProgress) -> list[RequestRecord]:
        """Return the target's continuation of each request's prompt, in the order of `requests`.

        Prompts of one length mostly start together, since attention takes requests with equally many rows in one call.
        Apart from rounding, the texts do not depend on that order.
        """
        by_length = sorted(requests, key=lambda request: (-request.max_new_tokens, len(request.prompt_ids)))
        engine = self._engine(temperature)
        with _without_collecting():
            records = engine.generate(by_length, on_finish=progress.count).requests
        found = {record.request_id: record for record in records}
        return [found[request.request_id] for request in requests]

    def _engine(self, temperature: float) -> Engine:
        """Return the engine of a temperature.

        On a CPU, or on a GPU with less than half its memory free, the engines of other temperatures are dropped first.
        """
        if temperature not in self._engines:
            if self._is_tight():
                self._engines.clear()
                gc.collect()  # an engine and its graphs are a reference cycle
            sampling = SamplingConfig(temperature, top_p=self.config.top_p if temperature else None)
            chosen = self.chosen.again(dataclasses.replace(self.chosen.config, sampling=sampling))
            longest = Request("longest", "", (0,) * self.config.max_prompt_tokens, self.config.max_new_tokens)
            limits = engine_limits(chosen, [longest] * self.config.batch_size, 0)
            self._engines[temperature] = plain_engine(chosen, self.models, limits)
        return self._engines[temperature]

    def _is_tight(self) -> bool:
        if self.models.device.type != "cuda":
            return bool(self._engines)
        free, total = torch.cuda.mem_get_info(self.models.device)
        return free < total / 2


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Switch Python's garbage collector off inside.

    Every token allocates a list, so the collector would go through all objects again and again. That takes as long as
    the bookkeeping of the tokens itself.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class TextProgress:
    """Counts finished texts. Every ten seconds it prints their number, the speed and the time left to stderr.

    `with TextProgress("answers", num_texts, done) as progress: ...`
    """

    def __init__(self, what: str, num_texts: int, num_done: int = 0) -> None:
        self._what, self._num_texts = what, num_texts
        self._num_done = self._num_before = num_done
        self.num_tokens = 0
        self._began_at = time.perf_counter()
        self._said_at = self._began_at

    def __enter__(self) -> TextProgress:
        self.say()
        return self

    def __exit__(self, *raised: object) -> None:
        self.say()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began_at

    def count(self, record: RequestRecord) -> None:
        """Count a text that has ended."""
        self._num_done += 1
        self.num_tokens += len(record.output_ids)
        if time.perf_counter() - self._said_at >= SECONDS_BETWEEN_LINES:
            self.say()

    def say(self) -> None:
        """Print the progress line."""
        self._said_at = time.perf_counter()
        seconds, num_new = max(self.seconds, 1e-9), self._num_done - self._num_before
        num_texts = max(self._num_texts, self._num_done)
        remaining = f", {seconds / num_new * (num_texts - self._num_done):.0f} s to go" if num_new else ""
        print(
            f"[{seconds:6.1f} s] {self._what}: {self._num_done}/{num_texts} texts, {self.num_tokens} tokens, "
            f"{self.num_tokens / seconds:.0f} tokens/s{remaining}",
            file=sys.stderr,
            flush=True,
        )
