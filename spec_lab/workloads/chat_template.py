"""A checkpoint's own chat template: a program from elsewhere, kept from running code, for ever, or to any length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spec_lab.checkpoints.json_input import ConfigFields, read_json
from spec_lab.corpus.example import Form
from spec_lab.errors import UserError, describe_error, one_line
from spec_lab.workloads.time_limit import time_limit

# A template that does its work is done within milliseconds, and adds a few lines to the prompt.
MOST_SECONDS = 5.0
MOST_ADDED = 1_000_000


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a prompt, and whether it already spells the special tokens that the tokenizer would add (BOS)."""

    text: str
    has_special_tokens: bool


class ChatTemplate:
    """Renders prompts by a checkpoint's chat template, which spells BOS itself; a text to continue is left as it is."""

    def __init__(self, folder: Path, most_seconds: float = MOST_SECONDS) -> None:
        """Nothing is read before the first chat prompt. Reading, and each rendering, may take `most_seconds`."""
        self._folder = folder
        self._most_seconds = most_seconds
        self._apply: Callable[[Sequence[str]], Rendered] | None = None

    def __call__(self, form: Form, texts: Sequence[str]) -> Rendered:
        """Return the text of a chat, or of a text to continue; UserError where the checkpoint's template does not work.

        Args:
            texts: the turns of a chat, the user's first and last, with the assistant's in between; or the one text.
        """
        if form == "continue":
            return _as_it_is(texts)
        if self._apply is None:
            self._apply = self._load()
        return self._apply(texts)

    def _load(self) -> Callable[[Sequence[str]], Rendered]:
        from transformers import AutoTokenizer

        settings = self._folder / "tokenizer_config.json"
        if settings.exists():
            fields = ConfigFields(read_json(settings), str(settings))
            if not isinstance(fields.values.get("chat_template"), list):  # a list holds several, each with its name
                fields.text("chat_template", "")
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
            has_template = bool(tokenizer.chat_template)
        except Exception as error:  # broken files make transformers raise anything
            reason = _short(error)
            raise UserError(
                f"{settings}: this or a file beside it is no tokenizer that transformers reads without running the "
                f"checkpoint's own code ({reason}); fetch tokenizer and config.json again"
            ) from error
        if not has_template:
            return _as_it_is

        def apply(texts: Sequence[str]) -> Rendered:
            turns = [
                {"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)
            ]
            try:
                with time_limit(self._most_seconds):
                    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # a template raises what it likes
                raise self._broken(_short(error)) from error
            if not isinstance(text, str) or len(text) > sum(map(len, texts)) + MOST_ADDED:
                raise self._broken(f"it adds more than {MOST_ADDED} characters to a prompt")
            return Rendered(text, has_special_tokens=True)

        return apply

    def _broken(self, reason: str) -> UserError:
        own_file = self._folder / "chat_template.jinja"
        file = own_file if own_file.exists() else self._folder / "tokenizer_config.json"
        return UserError(
            f"{file}: the chat template cannot be rendered for one user turn ({reason}); mend it, or fetch it again"
        )


def _short(error: Exception) -> str:
    text = one_line(describe_error(error))
    return text if len(text) <= 200 else f"{text[:200]}..."


def _as_it_is(texts: Sequence[str]) -> Rendered:
    """A model without a template knows no turns: a conversation is one text, a paragraph a turn."""
    return Rendered("\n\n".join(texts), has_special_tokens=False)
