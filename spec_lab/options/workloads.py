"""The workloads and the answer checkers, with a registry entry (row) for each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from spec_lab.menu.config import RunConfig
from spec_lab.menu.option import CheckerOption, WorkloadOption
from spec_lab.workloads import checkers
from spec_lab.workloads.prompt_files import PROMPTS_FOLDER

if TYPE_CHECKING:
    from spec_lab.core.types import Request
    from spec_lab.workloads.tokenizer import Tokenizer

A_FILE = {"path": "FILE"}
ONE_LENGTH = {"prompt_tokens": "8", "num_requests": "8"}


def file_exists(config: RunConfig) -> str | None:
    """The path is a file."""
    path = config.workload.path
    if path is None or Path(path).is_file():
        return None
    return f"workload.path={path} is not a file; give the path of a JSON Lines file"


def has_those_categories(config: RunConfig) -> str | None:
    """The categories are among those of the shipped prompts."""
    known = {file.stem for file in PROMPTS_FOLDER.glob("*.jsonl")}
    unknown = sorted(set(config.workload.categories or ()) - known)
    if not unknown:
        return None
    return (
        f"workload.categories: {config.workload.name} has no {', '.join(unknown)}; there are {', '.join(sorted(known))}"
    )


def tells_nothing(config: RunConfig) -> str | None:
    """A system prompt is not set for prompts of one length, since these are no chats."""
    workload = config.workload
    return None if workload.system is None else f"workload.system is not read by workload={workload.name}; leave it out"


def asks_one_turn(config: RunConfig) -> str | None:
    """The number of turns is only set for workload=jsonl and spec_bench, whose files may have conversations."""
    turns, name = config.workload.turns, config.workload.name
    if turns is None:
        return None
    return f"workload.turns={turns} is not read by workload={name}; leave it out or choose workload=jsonl"


def pocket(config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    """Return the requests of workload=pocket."""
    from spec_lab.workloads.load import pocket_requests

    return pocket_requests(config, tokenizer)


def jsonl(config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    """Return the requests of workload=jsonl."""
    from spec_lab.workloads.load import jsonl_requests

    return jsonl_requests(config, tokenizer)


def spec_bench(config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    """Return the requests of workload=spec_bench."""
    from spec_lab.workloads.load import spec_bench_requests

    return spec_bench_requests(config, tokenizer)


def reasoning_gym(config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    """Return the requests of workload=reasoning_gym."""
    from spec_lab.workloads.load import reasoning_gym_requests

    return reasoning_gym_requests(config, tokenizer)


def user_turns(config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    """Return the requests of workload=user_turns."""
    from spec_lab.workloads.own_turns import user_turn_requests

    return user_turn_requests(config, tokenizer)


def outputs(config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    """Return the requests of workload=outputs."""
    from spec_lab.workloads.load import output_requests

    return output_requests(config, tokenizer)


def fixed_length(config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    """Return the requests of workload=fixed_length."""
    from spec_lab.workloads.load import fixed_length_requests

    return fixed_length_requests(config, tokenizer)


def random_ids(config: RunConfig, tokenizer: Tokenizer) -> list[Request]:
    """Return the requests of workload=random_ids."""
    from spec_lab.workloads.load import random_id_requests

    return random_id_requests(config, tokenizer)


ROWS = (
    WorkloadOption(name="pocket", load=pocket, refusals=(asks_one_turn, has_those_categories)),
    WorkloadOption(name="jsonl", load=jsonl, reads=A_FILE, refusals=(file_exists,)),
    WorkloadOption(name="spec_bench", load=spec_bench, reads=A_FILE, refusals=(file_exists,)),
    WorkloadOption(
        name="reasoning_gym",
        load=reasoning_gym,
        reads={"per_category": "20", "tasks": "[chain_sum]"},
        refusals=(asks_one_turn,),
    ),
    WorkloadOption(
        name="user_turns",
        load=user_turns,
        reads={"num_requests": "100"},
        has_categories=False,
        refusals=(asks_one_turn, tells_nothing),
    ),
    WorkloadOption(name="outputs", load=outputs, reads={"path": "FOLDER"}, refusals=(asks_one_turn,)),
    WorkloadOption(
        name="fixed_length",
        load=fixed_length,
        reads=ONE_LENGTH,
        has_categories=False,
        refusals=(asks_one_turn, tells_nothing),
    ),
    WorkloadOption(
        name="random_ids",
        load=random_ids,
        reads=ONE_LENGTH,
        has_categories=False,
        reads_text=False,
        refusals=(asks_one_turn, tells_nothing),
    ),
)

CHECKERS = (
    CheckerOption(name="answer", read=checkers.read_line, same=checkers.same_words, expects=checkers.is_filled),
    CheckerOption(
        name="last_number", read=checkers.read_number, same=checkers.same_number, expects=checkers.has_number
    ),
    CheckerOption(name="boxed", read=checkers.read_box, same=checkers.same_formula, expects=checkers.has_formula),
    CheckerOption(name="choice", read=checkers.read_choice, same=checkers.same_choice, expects=checkers.has_choice),
    CheckerOption(name="exact", read=checkers.read_all, same=checkers.same_text, expects=checkers.is_filled),
)
