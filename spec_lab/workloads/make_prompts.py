"""Writes the evaluation prompts that ship with the project: `python -m spec_lab.workloads.make_prompts`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from spec_lab.corpus.categories import CATEGORIES, NATURAL_CATEGORIES, generate
from spec_lab.corpus.example import ANSWER_MARKER, Example
from spec_lab.corpus.natural import natural_text
from spec_lab.workloads.prompt_files import PROMPTS_FOLDER

PROMPTS_PER_CATEGORY = 96
SEED = 2026
WINDOW = 48
_MIN_LETTERS_IN_WINDOW = 24


def telling_windows(text: str) -> set[str]:
    """Return all windows of `WINDOW` characters of which at least half are letters. Such a window identifies its
    text."""
    stretches = (text[start : start + WINDOW] for start in range(len(text) - WINDOW + 1))
    return {stretch for stretch in stretches if sum(map(str.isalpha, stretch)) >= _MIN_LETTERS_IN_WINDOW}


def unseen_examples(category: str, num_candidates: int) -> Iterator[Example]:
    """Yield eval examples of a natural category whose prompts share none of their `telling_windows` with the training
    files."""
    stream = generate(category, "eval", SEED)
    windows_of = {
        example: telling_windows(example.prompt) for example, _ in zip(stream, range(num_candidates), strict=False)
    }
    seen = set().union(*windows_of.values())
    for document in natural_text("train"):
        seen_here = (document[start : start + WINDOW] for start in range(len(document) - WINDOW + 1))
        seen.difference_update(seen.intersection(seen_here))
    unseen = seen
    yield from (example for example, windows in windows_of.items() if windows <= unseen)


def eval_examples(category: str) -> list[Example]:
    """Draw `PROMPTS_PER_CATEGORY` examples with different prompts."""
    if category in NATURAL_CATEGORIES:
        stream = unseen_examples(category, num_candidates=12 * PROMPTS_PER_CATEGORY)
    else:
        stream = generate(category, "eval", SEED)
    chosen: dict[str, Example] = {}
    for example in stream:
        chosen.setdefault(example.prompt, example)
        if len(chosen) == PROMPTS_PER_CATEGORY:
            return list(chosen.values())
    raise ValueError(f"only {len(chosen)} prompts of {category} share no text with training; raise num_candidates")


def write_prompts(folder: Path) -> None:
    """Write a JSON Lines file for each category. Natural text has no answer, since many continuations are right."""
    folder.mkdir(parents=True, exist_ok=True)
    for category in CATEGORIES:
        lines = []
        for number, example in enumerate(eval_examples(category), start=1):
            answer = example.answer.removeprefix(ANSWER_MARKER).strip() if example.form == "chat" else None
            record = {
                "id": f"{category}-{number:04d}",
                "category": category,
                "form": example.form,
                "prompt": example.prompt,
                "answer": answer,
            }
            lines.append(json.dumps(record, ensure_ascii=False))
        (folder / f"{category}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{category}: {len(lines)} prompts")


if __name__ == "__main__":
    write_prompts(PROMPTS_FOLDER)
