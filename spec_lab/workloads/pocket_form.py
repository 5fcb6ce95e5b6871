"""The form of texts of the shipped pocket targets: their special tokens, chat template, and rendered prompts."""

from __future__ import annotations

from collections.abc import Sequence
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
"""The chat template in the shipped targets' files. `render_conversation` also removes earlier thinking."""

Form = Literal["chat", "continue"]


def render_prompt(form: Form, prompt: str) -> str:
    """Return the text of a prompt. A chat's prompt ends where the assistant's turn begins, before `<think>`."""
    if form == "continue":
        return f"{END_OF_TEXT}{prompt}"
    return render_conversation([prompt])


def render_conversation(texts: Sequence[str]) -> str:
    """Return the text of a chat, without earlier thinking. Turns alternate between user and assistant, and the first
    and the last are the user's."""
    turns = [
        f"{ASSISTANT}\n{text.rpartition(THINK_END)[2].lstrip()}" if index % 2 else f"{USER}\n{text}"
        for index, text in enumerate(texts)
    ]
    return "".join(f"{turn}{END_OF_TURN}\n" for turn in turns) + f"{ASSISTANT}\n"
