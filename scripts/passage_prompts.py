"""Prompts about passages of given texts, for a target that writes what a drafter learns on.

    python scripts/passage_prompts.py OUT.jsonl TEXT.txt... [--uses 2] [--seed 0]

A model that writes its own prompts writes short ones. Served prompts often hold a document, from which an answer
copies. Each passage has 80 to 320 words and gets `--uses` different tasks. So two prompts may share a passage, but
no task.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

ABOUT_ALL = (
    "Write a short summary of this text.\n\n{passage}",
    "{passage}\n\nIn two or three sentences, what is said here?",
    "List the main points of the following passage.\n\n{passage}",
    "Here is a passage:\n\n{passage}\n\nExplain it in simple words.",
    "Read this and give it a title, then say in one paragraph what it is about.\n\n{passage}",
    "{passage}\n\nWhich people, places and dates are named above?",
    "Rewrite the text below in modern English.\n\n{passage}",
)
ABOUT_A_WORD = (
    "Use the passage to answer the question.\n\nPassage: {passage}\n\nQuestion: What does it say about {word}?",
    "{passage}\n\nAccording to this text, why does {word} matter?",
    "Answer from these lines alone: who or what is {word}?\n\n{passage}",
)


def passages(text: str, chance: random.Random) -> Iterator[str]:
    """Cut a text into runs of whole paragraphs or sentences, each of 80 words or more and about 320 at most."""
    kept: list[str] = []
    goal = chance.randint(80, 300)
    for sentence in re.split(r"(?<=[.!?])\s+", " ".join(text.split())):
        kept.append(sentence)
        num_words = sum(len(each.split()) for each in kept)
        if num_words >= goal:
            if num_words <= 320:
                yield " ".join(kept)
            kept, goal = [], chance.randint(80, 300)


def tasks(passage: str, uses: int, chance: random.Random) -> Iterator[str]:
    """Return `uses` prompts about the passage, each of another kind."""
    words = sorted(set(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{3,}|\b[a-z]{8,}\b", passage)))
    for kind in chance.sample(ABOUT_ALL + (ABOUT_A_WORD if words else ()), uses):
        yield kind.format(passage=passage, word=chance.choice(words or [""]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--uses", type=int, default=2, choices=range(1, 8))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    prompts = [
        prompt
        for file in sorted(given.texts)
        for passage in passages(file.read_text(encoding="utf-8"), chance)
        for prompt in tasks(passage, given.uses, chance)
    ]
    chance.shuffle(prompts)
    given.out.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    print(f"{len(prompts)} prompts in {given.out}")


if __name__ == "__main__":
    main()
