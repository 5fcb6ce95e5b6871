"""The workloads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import MISSING

from spec_lab.config.groups import WorkloadConfig
from spec_lab.config.option import knob, option
from spec_lab.config.run import Run

if TYPE_CHECKING:
    from spec_lab.core.types import Request
    from spec_lab.workloads.tokenizer import Tokenizer


@option("workload", "pocket")
class Pocket(WorkloadConfig):
    """The shipped evaluation prompts, in nine categories; a program checks most answers."""

    limit: int | None = knob(9, "number of prompts, taken from the categories in turn; null is all of them", least=1)

    def load(self, run: Run, tokenizer: Tokenizer) -> list[Request]:
        from spec_lab.workloads.load import in_turn
        from spec_lab.workloads.prompt_files import shipped_prompts

        return in_turn(shipped_prompts(), run, tokenizer)


@option("workload", "jsonl")
class Jsonl(WorkloadConfig):
    """Prompts of your own, from a JSON Lines file."""

    path: str = knob(MISSING, "JSON Lines file with the prompts")
    turns: int | None = knob(None, "number of turns of a conversation that are asked; null is all of them", least=1)

    def load(self, run: Run, tokenizer: Tokenizer) -> list[Request]:
        from spec_lab.workloads.load import in_turn
        from spec_lab.workloads.prompt_files import read_jsonl

        return in_turn(read_jsonl(self), run, tokenizer)


@option("workload", "spec_bench")
class SpecBench(Jsonl):
    """Questions of Spec-Bench and MT-bench, from a file as they are published."""

    def load(self, run: Run, tokenizer: Tokenizer) -> list[Request]:
        from spec_lab.workloads.load import in_turn
        from spec_lab.workloads.prompt_files import read_spec_bench

        return in_turn(read_spec_bench(self), run, tokenizer)


@option("workload", "reasoning_gym")
class ReasoningGym(WorkloadConfig):
    """Prompts that the package reasoning_gym makes, with answers that it checks."""

    tasks: list[str] = knob(["chain_sum"], "tasks of reasoning_gym, each a category")
    per_category: int = knob(20, "number of prompts of each task", most=10**4, least=1)

    def load(self, run: Run, tokenizer: Tokenizer) -> list[Request]:
        from spec_lab.workloads.load import in_turn
        from spec_lab.workloads.reasoning_gym import made_prompts

        return in_turn(made_prompts(self.tasks, self.per_category, run.seed), run, tokenizer)


@option("workload", "fixed_length")
class FixedLength(WorkloadConfig):
    """Natural text of one length, for speed studies."""

    ignore_eos: bool = True
    prompt_tokens: int = knob(64, "tokens of each prompt", most=10**7, least=1)
    num_requests: int = knob(8, "number of requests", most=10**6, least=1)

    def load(self, run: Run, tokenizer: Tokenizer) -> list[Request]:
        from spec_lab.workloads.load import fixed_length_requests

        return fixed_length_requests(self, run, tokenizer)


@option("workload", "random_ids")
class RandomIds(FixedLength):
    """Uniform token ids, for measuring kernels only: they overstate the throughput of real text."""

    reads_text = False

    def load(self, run: Run, tokenizer: Tokenizer) -> list[Request]:
        from spec_lab.workloads.load import random_id_requests

        return random_id_requests(self, run, tokenizer)


@option("workload", "user_turns")
class UserTurns(WorkloadConfig):
    """The target writes prompts itself: it continues the start of a user's turn. For the texts that a head learns."""

    num_requests: int = knob(100, "number of turns that are begun", most=10**6, least=1)

    def load(self, run: Run, tokenizer: Tokenizer) -> list[Request]:
        from spec_lab.workloads.own_turns import user_turn_requests

        return user_turn_requests(self, run, tokenizer)


@option("workload", "outputs")
class Outputs(WorkloadConfig):
    """What another run answered, as prompts."""

    path: str = knob(MISSING, "folder of the run")

    def load(self, run: Run, tokenizer: Tokenizer) -> list[Request]:
        from spec_lab.workloads.load import in_turn
        from spec_lab.workloads.own_turns import outputs_of

        return in_turn(outputs_of(Path(self.path), tokenizer), run, tokenizer)
