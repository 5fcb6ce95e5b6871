"""One piece of text the pocket model is trained or evaluated on, and how it is written out for the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

END_OF_TEXT = "<|endoftext|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END_OF_TURN = "<|end|>"
THINK_START = "<think>"
THINK_END = "</think>"
SPECIAL_TOKENS = (END_OF_TEXT, USER, ASSISTANT, END_OF_TURN, THINK_START, THINK_END)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ ('{USER}' if message['role'] == 'user' else '{ASSISTANT}')"
    f" + '\\n' + message['content'] + '{END_OF_TURN}\\n' }}}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{ASSISTANT}\\n' }}}}{{% endif %}}"
)
"""The shipped targets' files write a conversation so; `render_conversation` leaves earlier thinking out besides."""

ANSWER_MARKER = "Answer:"

Form = Literal["chat", "continue"]


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with what should follow it.

    A `chat` example has one user turn and one assistant turn that thinks before it answers. A `continue` example is raw
    text cut in two: `answer` is the text after `prompt`, and `thinking` is empty.
    """

    category: str
    form: Form
    prompt: str
    thinking: str
    answer: str


def render_prompt(form: Form, prompt: str) -> str:
    """Return the text a model is given; in a chat it ends where the assistant's turn begins, before `<think>`."""
    if form == "continue":
        return f"{END_OF_TEXT}{prompt}"
    return render_conversation([prompt])


def render_conversation(texts: Sequence[str]) -> str:
    """Return a chat of the turns of user and assistant, the user's first and last; earlier thinking is left out."""
    turns = [
        f"{ASSISTANT}\n{text.rpartition(THINK_END)[2].lstrip()}" if index % 2 else f"{USER}\n{text}"
        for index, text in enumerate(texts)
    ]
    return "".join(f"{turn}{END_OF_TURN}\n" for turn in turns) + f"{ASSISTANT}\n"


def render_example(example: Example) -> str:
    """Return the prompt and what the model is trained to write after it."""
    prompt = render_prompt(example.form, example.prompt)
    if example.form == "continue":
        return f"{prompt}{example.answer}"
    return f"{prompt}{THINK_START}\n{example.thinking}\n{THINK_END}\n{example.answer}{END_OF_TURN}"
