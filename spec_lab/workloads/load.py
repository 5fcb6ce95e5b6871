"""From a workload's configuration to requests."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from spec_lab.assembly import registry
from spec_lab.config import RunConfig, WorkloadConfig
from spec_lab.core.types import Request
from spec_lab.corpus.example import Form
from spec_lab.errors import UserError
from spec_lab.workloads.generated import answer_of, generated_examples
from spec_lab.workloads.tokenizer import TargetTokenizer

PROMPTS_FOLDER = Path(__file__).parent / "prompts"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt set."""

    prompt_id: str
    category: str
    form: Form
    text: str
    answer: str | None


def load_requests(config: RunConfig, tokenizer: TargetTokenizer) -> list[Request]:
    """The requests of `config.workload`; UserError when none is left or a file is not what it should be."""
    requests = registry.of(config).workload(config).load(config, tokenizer)
    if not requests:
        raise UserError(
            f"workload={config.workload.name} is empty; check workload.limit, workload.categories and workload.path"
        )
    _refuse_duplicates(requests)
    return requests


def shipped_prompts() -> list[Prompt]:
    """The evaluation prompts that come with the package, one category after the other."""
    files = sorted(PROMPTS_FOLDER.glob("*.jsonl"))
    return [_prompt(row, path) for path in files for row in _json_lines(path)]


def pocket_requests(config: RunConfig, tokenizer: TargetTokenizer) -> list[Request]:
    """The shipped evaluation prompts."""
    return _in_turn(shipped_prompts(), config, tokenizer)


def jsonl_requests(config: RunConfig, tokenizer: TargetTokenizer) -> list[Request]:
    """The prompts of `read_jsonl`."""
    return _in_turn(read_jsonl(config.workload), config, tokenizer)


def spec_bench_requests(config: RunConfig, tokenizer: TargetTokenizer) -> list[Request]:
    """The questions of `read_spec_bench`."""
    return _in_turn(read_spec_bench(config.workload), config, tokenizer)


def read_jsonl(config: WorkloadConfig) -> list[Prompt]:
    """Own prompts: `prompt`, and optionally `id`, `category`, `form` (chat or continue), `answer`."""
    path = _path(config)
    return [_prompt({"id": f"{path.stem}-{number:04d}"} | row, path) for number, row in enumerate(_json_lines(path))]


def read_spec_bench(config: WorkloadConfig) -> list[Prompt]:
    """Question files of Spec-Bench and MT-bench: `question_id`, `category`, `turns`; the first turn is asked."""
    path = _path(config)
    prompts = []
    for row in _json_lines(path):
        try:
            text = str(row["turns"][0])
            prompts.append(Prompt(f"{path.stem}-{row['question_id']}", str(row["category"]), "chat", text, None))
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(f"{path}: a question needs question_id, category and turns: {error!r}") from error
    return prompts


def generated_requests(config: RunConfig, tokenizer: TargetTokenizer) -> list[Request]:
    """workload.per_category prompts a checkable category, drawn by the run's seed."""
    workload = config.workload
    if not workload.per_category:
        raise UserError(f"workload={workload.name} needs workload.per_category of 1 or more")
    drawn = generated_examples(workload.categories, workload.per_category, config.seed)
    prompts = [
        Prompt(f"{category}-s{config.seed}-{number:04d}", category, example.form, example.prompt, answer_of(example))
        for category, examples in drawn.items()
        for number, example in enumerate(examples, start=1)
    ]
    return _in_turn(prompts, config, tokenizer)


def _in_turn(prompts: list[Prompt], config: RunConfig, tokenizer: TargetTokenizer) -> list[Request]:
    return [
        Request(
            request_id=prompt.prompt_id,
            category=prompt.category,
            prompt_ids=tuple(tokenizer.encode_prompt(prompt.form, prompt.text)),
            max_new_tokens=config.max_new_tokens,
            answer=prompt.answer,
            ignore_eos=config.workload.ignore_eos,
        )
        for prompt in select_prompts(prompts, config.workload.categories, config.workload.limit)
    ]


def select_prompts(prompts: list[Prompt], categories: list[str] | None, limit: int | None) -> list[Prompt]:
    """`limit` prompts of `categories`, one of each category in turn, so that a small limit still shows them all."""
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    unknown = sorted(set(categories or ()) - set(by_category))
    if unknown:
        raise UserError(
            f"workload.categories: no category {', '.join(unknown)}; there are {', '.join(sorted(by_category))}"
        )
    chosen = [by_category[name] for name in (categories or sorted(by_category))]
    in_turn = [prompt for prompt in chain.from_iterable(zip_longest(*chosen)) if prompt is not None]
    return in_turn[:limit]


def fixed_length_requests(config: RunConfig, tokenizer: TargetTokenizer) -> list[Request]:
    """Shipped natural text cut to exactly workload.prompt_tokens tokens."""
    text = "\n\n".join(prompt.text for prompt in shipped_prompts() if prompt.form == "continue")
    ids = tokenizer.encode(text)
    num_requests, length = _sizes(config.workload)
    windows = (ids[i * length : (i + 1) * length] for i in range(num_requests))
    repeated = (window if len(window) == length else (ids * (length // len(ids) + 1))[:length] for window in windows)
    return _id_requests(repeated, config)


def random_id_requests(config: RunConfig, tokenizer: TargetTokenizer) -> list[Request]:
    """Uniform token ids. They overstate throughput of real text (SPEED-Bench, arXiv 2604.09557): for kernels only."""
    num_requests, length = _sizes(config.workload)
    generator = random.Random(config.seed)
    prompts = ([generator.randrange(tokenizer.vocab_size) for _ in range(length)] for _ in range(num_requests))
    return _id_requests(prompts, config)


def _id_requests(prompts: Iterable[list[int]], config: RunConfig) -> list[Request]:
    name, limit = config.workload.name, config.workload.limit
    requests = [
        Request(f"{name}-{number:04d}", name, tuple(ids), config.max_new_tokens, ignore_eos=config.workload.ignore_eos)
        for number, ids in enumerate(prompts)
    ]
    return requests[:limit]


def _sizes(config: WorkloadConfig) -> tuple[int, int]:
    if not config.num_requests or not config.prompt_tokens:
        raise UserError(f"workload={config.name} needs workload.num_requests and workload.prompt_tokens of 1 or more")
    return config.num_requests, config.prompt_tokens


def _path(config: WorkloadConfig) -> Path:
    if config.path is None:
        raise UserError(f"workload={config.name} reads a file: set workload.path=FILE.jsonl")
    return Path(config.path)


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"workload.path: no file {path}")
    rows = []
    for number, line in enumerate(_utf8_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number} is not a JSON object")
        rows.append(row)
    return rows


def _utf8_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start + 1}: {error.reason}); save it as UTF-8") from error


def _prompt(row: dict[str, Any], path: Path) -> Prompt:
    form = row.get("form", "chat")
    if not isinstance(row.get("prompt"), str) or form not in ("chat", "continue"):
        raise UserError(f"{path}: a line needs a text `prompt`, and `form` chat or continue if any: {str(row)[:80]}")
    answer = row.get("answer")
    return Prompt(
        str(row["id"]),
        str(row.get("category", path.stem)),
        form,
        row["prompt"],
        None if answer is None else str(answer),
    )


def _refuse_duplicates(requests: list[Request]) -> None:
    seen: set[str] = set()
    for request in requests:
        if request.request_id in seen:
            raise UserError(f"workload: two prompts have the id {request.request_id}; ids must differ")
        seen.add(request.request_id)
