"""A checkpoint's own chat template, which transformers renders in its sandbox."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.gguf_tokenizer import chat_template, special_tokens
from spec_lab.checkpoints.json_input import read_json
from spec_lab.workloads.pocket_form import Form

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TEMPLATE = "none"
SWITCHES = ("enable_thinking", "thinking")
"""The names of templates' switches for thinking: Qwen3's and Gemma 4's, and DeepSeek V3.1's and Granite's."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a prompt, and whether it already has the special tokens that the tokenizer would add (BOS)."""

    text: str
    has_special_tokens: bool


def stored_template(folder: Path) -> str | None:
    """Return the chat template of a folder or a GGUF file, as text; None if there is none."""
    if is_gguf(folder):
        return chat_template(folder)
    own_file, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if own_file.exists():
        return own_file.read_text(encoding="utf-8")
    found = read_json(settings).get("chat_template") if settings.exists() else None
    return None if found is None else str(found)


def template_digest(folder: Path) -> str:
    """Return a digest of twelve digits of a checkpoint's chat template; `none` if it has none."""
    template = stored_template(folder)
    return NO_TEMPLATE if template is None else hashlib.sha256(template.encode()).hexdigest()[:12]


class ChatTemplate:
    """Renders prompts with a checkpoint's chat template, which writes BOS itself; a text to continue is left
    unchanged."""

    def __init__(self, folder: Path, thinking: bool | None = None) -> None:
        """Set the folder, which is not read before the first chat prompt.

        `thinking` is passed to the template by the names in `SWITCHES`; None passes nothing.
        """
        self._folder = folder
        self._thinking = thinking

    def __call__(self, form: Form, texts: Sequence[str], system: str | None = None) -> Rendered:
        """Return the rendered prompt of a chat, or of a text to continue.

        Args:
            texts: the turns of a chat, alternately of user and assistant, the last one the user's; or one text.
            system: the system prompt of a chat.
        """
        if form == "continue" or self._tokenizer is None:
            # A model that was trained without turns reads a conversation as one text with a paragraph for each turn.
            return Rendered("\n\n".join(texts if system is None else [system, *texts]), has_special_tokens=False)
        told = [] if system is None else [{"role": "system", "content": system}]
        turns = told + [
            {"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)
        ]
        text = self._rendered(turns, self._thinking)
        return Rendered(text, has_special_tokens=True)

    def _rendered(self, turns: list[dict[str, str]], thinking: bool | None) -> str:
        assert self._tokenizer is not None
        switches = {} if thinking is None else dict.fromkeys(SWITCHES, thinking)
        text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **switches)
        assert isinstance(text, str)
        return text

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer that renders the template; None if there is no template."""
        if is_gguf(self._folder):
            return _of_file(self._folder)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
        return tokenizer if tokenizer.chat_template else None

    def has_switch(self) -> bool:
        """Return whether `thinking` changes what a template writes."""
        turns = [{"role": "user", "content": "Hi"}]
        return self._tokenizer is not None and self._rendered(turns, True) != self._rendered(turns, False)


def _of_file(path: Path) -> PreTrainedTokenizerBase | None:
    """Return a tokenizer that renders a GGUF file's template; None if the file has no template. Rendering needs the
    texts of a few tokens, but no vocabulary."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    template = chat_template(path)
    if not template:
        return None
    empty = Tokenizer(models.BPE())
    return PreTrainedTokenizerFast(tokenizer_object=empty, chat_template=template, **special_tokens(path))
