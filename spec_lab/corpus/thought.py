"""Turns a problem into a conversation, with a scene before the question, and free prose between the solution's
steps."""

from __future__ import annotations

from random import Random

from spec_lab.corpus.difficulty import Prose
from spec_lab.corpus.example import ANSWER_MARKER, Example
from spec_lab.corpus.grammar import REMARKS, RULES
from spec_lab.corpus.phrasing import Phraser
from spec_lab.corpus.scene import draw_facts, opening_sentences
from spec_lab.corpus.task import Task, draw_between

_NOTE_IN_PROMPT = "[A note|A card|A page|A sign] [says|reads|begins]: {opening} ..."
_NOTE_IN_THOUGHT = "[The note|The card|The page|The sign|It] [must say|goes on|may read|says|would be]: {note}."


def tell(category: str, task: Task, prose: Prose, sentences: tuple[str, ...], random: Random) -> Example:
    """Return an example of `task`, in one of its wordings.

    `sentences` are natural sentences of the task's split. A prompt may quote the beginning of one, and the thinking
    completes it. So greedy thinking differs between prompts, and in these sentences it is as uncertain as real text.
    """
    say = Phraser(random, RULES, draw_facts(random))
    scene = opening_sentences(say, draw_between(random, prose.num_scene_facts))
    asides = [say.sentence(remark) for remark in random.sample(REMARKS, draw_between(random, prose.num_remarks))]
    if random.random() < prose.note_probability:
        note = sentences[int(random.random() * len(sentences))]
        opening = " ".join(note.split()[: draw_between(random, prose.note_opening_words)])
        scene.append(say.say(_NOTE_IN_PROMPT, opening=opening))
        asides.append(say.say(_NOTE_IN_THOUGHT, note=note))
    random.shuffle(scene)
    prompt = " ".join([*scene, task.question(say)])
    return Example(category, "chat", prompt, _weave(task.steps(say), asides, random), f"{ANSWER_MARKER} {task.answer}")


def _weave(steps: list[str], asides: list[str], random: Random) -> str:
    """Return the steps in order, with asides at random places before the last step."""
    woven = list(steps)
    random.shuffle(asides)
    for aside in asides:
        woven.insert(int(random.random() * len(woven)), aside)
    return " ".join(woven)
