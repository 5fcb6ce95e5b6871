"""The engines beside the lab. `spec_lab.engines` says what each can be asked for; nothing here imports one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from spec_lab.config.groups import EngineConfig
from spec_lab.config.option import knob, option
from spec_lab.config.run import Run
from spec_lab.engines.plan import EngineFile, EnginePlan, Refusal, plan_of


@dataclass
class OtherEngine(EngineConfig):
    """The keys of every engine that decodes in a process of its own."""

    python: str | None = knob(None, "Python of the environment that has the engine; null is this one")
    target: str | None = knob(
        None, "the target's weights in a format that the engine reads; null is target.path, converted where the lab can"
    )
    head: str | None = knob(None, "the drafter's weights likewise; null is the drafter's folder")
    timeout: float = knob(600.0, "seconds without a word from the engine, after which the run fails", above=0)
    options: dict[str, Any] = knob({}, "further arguments of the engine's own, by its names")

    def files(self, run: Run) -> list[Path]:
        return [Path(file) for file in (self.target, self.head) if file is not None]

    def check(self, run: Run) -> Iterator[str]:
        planned = self.plan(run)
        yield from planned.reasons if isinstance(planned, Refusal) else ()

    def plan(self, run: Run) -> EnginePlan | Refusal:
        return plan_of(run, engine_file(self.name))


def engine_file(name: str) -> EngineFile:
    """Return the module of an engine, which imports nothing of the engine itself."""
    return cast(EngineFile, import_module(f"spec_lab.engines.{name}"))


@option("engine", "llamacpp")
class LlamaCpp(OtherEngine):
    """llama.cpp, in the process of its Python package xllamacpp."""


@option("engine", "transformers")
class Transformers(OtherEngine):
    """`generate` of transformers, with an assistant, prompt lookup or MTP."""


@option("engine", "server")
class Server(OtherEngine):
    """A server that already runs. `drafter` and its K are what it was started with."""

    lasting = False  # it may have been started anew with another drafter

    url: str | None = knob(None, "the server's address, such as http://127.0.0.1:8000")
    plain_url: str | None = knob(
        None, "the same of a server without a drafter, for references=[plain]; null has no such reference"
    )
    model: str | None = knob(None, "the model's name there; null is the first that it serves")
    counters: bool = knob(True, "count drafts by its page /metrics; false leaves acceptance unknown")


@option("engine", "vllm")
class Vllm(OtherEngine):
    """vLLM's offline `LLM`."""


@option("engine", "sglang")
class Sglang(OtherEngine):
    """SGLang's offline `Engine`."""
