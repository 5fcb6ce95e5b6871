"""Makes prompts and their answers with reasoning_gym, a separate package (Apache-2.0), from tasks and a seed."""

from __future__ import annotations

from collections.abc import Sequence

from spec_lab.config.nearest import nearest
from spec_lab.core.errors import UserError, one_line
from spec_lab.workloads.prompt_files import Prompt

ASKS_FOR_A_LINE = "\n\nEnd with a line that begins with `Answer:` and holds the answer alone."
"""Appended to questions, so that `workload.checker=answer` finds the answer."""
INSTALL = "pip install -c constraints.txt -e '.[prompts]'"


def made_prompts(tasks: Sequence[str], count: int, seed: int) -> list[Prompt]:
    """Return `count` prompts of each task, which is also their category.

    Answers are compared by `workload.checker`. The task's own scorer is not used; it may also accept other answers.

    Raises:
        UserError: see `made_questions`.
    """
    prompts: list[Prompt] = []
    for task in tasks:
        for number, (question, answer) in enumerate(made_questions("workload.tasks", task, count, seed), start=1):
            text, expected = question + ASKS_FOR_A_LINE, None if answer is None else str(answer)
            prompts.append(Prompt(f"{task}-s{seed}-{number:04d}", task, "chat", text, expected))
    return prompts


def made_questions(knob: str, task: str, count: int, seed: int) -> list[tuple[str, object]]:
    """Return `count` questions of a task with their answers; `knob` is the setting that names the task.

    Raises:
        UserError: the package is not installed, has no such task, or cannot make questions with its default settings.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise UserError(f"{knob}: {one_line(task)} needs reasoning_gym, which is not installed; {INSTALL}") from error
    if task not in DATASETS:
        near = nearest(task, DATASETS)
        remedy = f"did you mean {near}?" if near else f"there are {', '.join(sorted(DATASETS))}"
        raise UserError(f"{knob}: reasoning_gym has no task {one_line(task)}; {remedy}")
    try:
        made = list(reasoning_gym.create_dataset(task, size=count, seed=seed))
    except (ValueError, AssertionError) as error:
        raise UserError(f"{knob}: {task} cannot be made ({one_line(error)}); take another task") from error
    return [(row["question"], row["answer"]) for row in made]
