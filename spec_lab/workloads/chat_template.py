"""A checkpoint's own chat template: a program from elsewhere, kept from running code, for ever, or to any length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.gguf_tokenizer import chat_template, special_tokens
from spec_lab.corpus.example import Form
from spec_lab.errors import UserError, describe_error, one_line
from spec_lab.models.json_input import ConfigFields, read_json
from spec_lab.workloads.time_limit import time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A template that does its work is done within milliseconds, and adds a few lines to the prompt.
MOST_SECONDS = 5.0
MOST_ADDED = 1_000_000


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a prompt, and whether it already spells the special tokens that the tokenizer would add (BOS)."""

    text: str
    has_special_tokens: bool


Apply = Callable[[Sequence[str], str | None], Rendered]


def stored_template(folder: Path) -> str | None:
    """Return the chat template of a folder or a GGUF file, as it stands there; None where there is none.

    Raises:
        UserError: the file that would hold it cannot be read.
    """
    if is_gguf(folder):
        return chat_template(folder)
    own_file, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if own_file.exists():
        try:
            return own_file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{own_file}: cannot be read ({one_line(error)}); fetch it again") from error
    found = read_json(settings).get("chat_template") if settings.exists() else None
    return None if found is None else str(found)


class ChatTemplate:
    """Renders prompts by a checkpoint's chat template, which spells BOS itself; a text to continue is left as it is."""

    def __init__(self, folder: Path, most_seconds: float = MOST_SECONDS) -> None:
        """Nothing is read before the first chat prompt. Reading, and each rendering, may take `most_seconds`."""
        self._folder = folder
        self._most_seconds = most_seconds
        self._apply: Apply | None = None

    def __call__(self, form: Form, texts: Sequence[str], system: str | None = None) -> Rendered:
        """Return the text of a chat, or of a text to continue; UserError where the checkpoint's template does not work.

        Args:
            texts: the turns of a chat, the user's first and last, with the assistant's in between; or the one text.
            system: what a chat is told in front of them.
        """
        if form == "continue":
            return _as_it_is(texts, None)
        if self._apply is None:
            self._apply = self._load()
        return self._apply(texts, system)

    def _load(self) -> Apply:
        tokenizer = _of_file(self._folder) if is_gguf(self._folder) else _of_folder(self._folder)
        if not tokenizer.chat_template:
            return _as_it_is

        def apply(texts: Sequence[str], system: str | None) -> Rendered:
            told = [] if system is None else [{"role": "system", "content": system}]
            turns = told + [
                {"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)
            ]
            try:
                with time_limit(self._most_seconds):
                    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # a template raises what it likes
                raise self._broken(_short(error)) from error
            if not isinstance(text, str) or len(text) > sum(map(len, [*texts, system or ""])) + MOST_ADDED:
                raise self._broken(f"it adds more than {MOST_ADDED} characters to a prompt")
            return Rendered(text, has_special_tokens=True)

        return apply

    def _broken(self, reason: str) -> UserError:
        folder, own_file = self._folder, self._folder / "chat_template.jinja"
        in_folder = own_file if own_file.exists() else folder / "tokenizer_config.json"
        file = folder if is_gguf(folder) else in_folder
        return UserError(f"{file}: the chat template cannot be rendered ({reason}); mend it, or fetch it again")


def _of_folder(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    settings = folder / "tokenizer_config.json"
    if settings.exists():
        fields = ConfigFields(read_json(settings), str(settings))
        if not isinstance(fields.values.get("chat_template"), list):  # a list holds several, each with its name
            fields.text("chat_template", "")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # broken files make transformers raise anything
        reason = _short(error)
        raise UserError(
            f"{settings}: this or a file beside it is no tokenizer that transformers reads without running the "
            f"checkpoint's own code ({reason}); fetch tokenizer and config.json again"
        ) from error


def _of_file(path: Path) -> PreTrainedTokenizerBase:
    """Make of a GGUF file what renders its template, which needs the texts of a few tokens and no vocabulary."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    empty = Tokenizer(models.BPE())
    return PreTrainedTokenizerFast(tokenizer_object=empty, chat_template=chat_template(path), **special_tokens(path))


def _short(error: Exception) -> str:
    text = one_line(describe_error(error))
    return text if len(text) <= 200 else f"{text[:200]}..."


def _as_it_is(texts: Sequence[str], system: str | None) -> Rendered:
    """A model without a template knows no turns: a conversation is one text, a paragraph a turn."""
    return Rendered("\n\n".join(texts if system is None else [system, *texts]), has_special_tokens=False)
