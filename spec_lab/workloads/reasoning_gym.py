"""Makes prompts and their answers with reasoning_gym, a separate package (Apache-2.0; the extra `prompts`), from
tasks and a seed."""

from __future__ import annotations

from collections.abc import Sequence

from spec_lab.workloads.prompt_files import Prompt

ASKS_FOR_A_LINE = "\n\nEnd with a line that begins with `Answer:` and holds the answer alone."
"""Appended to questions, so that `workload.checker=answer` finds the answer."""


def made_prompts(tasks: Sequence[str], count: int, seed: int) -> list[Prompt]:
    """Return `count` prompts of each task, which is also their category.

    Answers are compared by `workload.checker`. The task's own scorer is not used; it may also accept other answers.
    """
    prompts: list[Prompt] = []
    for task in tasks:
        for number, (question, answer) in enumerate(made_questions(task, count, seed), start=1):
            text, expected = question + ASKS_FOR_A_LINE, None if answer is None else str(answer)
            prompts.append(Prompt(f"{task}-s{seed}-{number:04d}", task, "chat", text, answer=expected))
    return prompts


def made_questions(task: str, count: int, seed: int) -> list[tuple[str, object]]:
    """Return `count` questions of a task with their answers."""
    import reasoning_gym

    return [(row["question"], row["answer"]) for row in reasoning_gym.create_dataset(task, size=count, seed=seed)]
