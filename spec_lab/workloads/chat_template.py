"""A checkpoint's own chat template. It is a program from outside, so transformers renders it in a sandbox, and its
time, memory and output are limited."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.gguf_tokenizer import chat_template, special_tokens
from spec_lab.checkpoints.json_input import ConfigFields, read_json
from spec_lab.core.errors import UserError, describe_error, one_line
from spec_lab.workloads.limits import OutOfBounds, time_limit, within_limits
from spec_lab.workloads.pocket_form import Form
from spec_lab.workloads.unusable import NO_SYSTEM, UnusablePrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A working template takes milliseconds, and adds a few lines to the prompt.
MOST_SECONDS = 5.0
MOST_BYTES = 2**29
MOST_ADDED = 1_000_000
MOST_SECONDS_OF_READING = 120.0
NO_TEMPLATE = "none"


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a prompt, and whether it already has the special tokens that the tokenizer would add (BOS)."""

    text: str
    has_special_tokens: bool


Apply = Callable[[Sequence[str], str | None], Rendered]


def stored_template(folder: Path) -> str | None:
    """Return the chat template of a folder or a GGUF file, as text; None if there is none.

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


def template_digest(folder: Path) -> str:
    """Return a digest of twelve digits of a checkpoint's chat template; `none` if it has none."""
    template = stored_template(folder)
    return NO_TEMPLATE if template is None else hashlib.sha256(template.encode()).hexdigest()[:12]


class ChatTemplate:
    """Renders prompts with a checkpoint's chat template, which writes BOS itself; a text to continue is left
    unchanged."""

    def __init__(self, folder: Path, most_seconds: float = MOST_SECONDS, thinking: bool | None = None) -> None:
        """Set the folder, which is not read before the first chat prompt. Each rendering may take `most_seconds`.

        `thinking` is passed as the template's `enable_thinking`; None passes nothing.
        """
        self._folder = folder
        self._options = {} if thinking is None else {"enable_thinking": thinking}
        self._most_seconds = most_seconds
        self._apply: Apply | None = None

    def __call__(self, form: Form, texts: Sequence[str], system: str | None = None) -> Rendered:
        """Return the rendered prompt of a chat, or of a text to continue.

        UserError if the template does not work, UnusablePrompt if it takes no system prompt.

        Args:
            texts: the turns of a chat, alternately of user and assistant, the last one the user's; or one text.
            system: the system prompt of a chat.
        """
        if form == "continue":
            return _as_it_is(texts, None)
        if self._apply is None:
            self._apply = self._load()
        return self._apply(texts, system)

    def _load(self) -> Apply:
        tokenizer = _of_file(self._folder) if is_gguf(self._folder) else _of_folder(self._folder)
        if tokenizer is None:
            return _as_it_is

        def render(texts: Sequence[str], system: str | None) -> str:
            told = [] if system is None else [{"role": "system", "content": system}]
            turns = told + [
                {"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)
            ]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **self._options)
            if not isinstance(text, str) or len(text) > sum(map(len, [*texts, system or ""])) + MOST_ADDED:
                raise ValueError(f"it adds more than {MOST_ADDED} characters to a prompt")
            if texts[-1].strip() not in text:
                raise ValueError("it leaves out the user's message")
            return text

        def apply(texts: Sequence[str], system: str | None) -> Rendered:
            try:
                text = within_limits(partial(render, texts, system), self._most_seconds, MOST_BYTES)
            except OutOfBounds as error:
                if system is not None and self._renders(partial(render, texts, None)):
                    raise UnusablePrompt(
                        f"the chat template of {self._folder} does not take a system "
                        f"prompt ({_short(str(error))}); {NO_SYSTEM}"
                    ) from error
                raise self._broken(_short(str(error))) from error
            return Rendered(text, has_special_tokens=True)

        return apply

    def _renders(self, render: Callable[[], str]) -> bool:
        try:
            within_limits(render, self._most_seconds, MOST_BYTES)
        except OutOfBounds:
            return False
        return True

    def _broken(self, reason: str) -> UserError:
        folder, own_file = self._folder, self._folder / "chat_template.jinja"
        in_folder = own_file if own_file.exists() else folder / "tokenizer_config.json"
        file = folder if is_gguf(folder) else in_folder
        return UserError(f"{file}: the chat template cannot be rendered ({reason}); correct it, or fetch it again")


def _of_folder(folder: Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that renders a folder's template; None if it has none."""
    from transformers import AutoTokenizer

    settings = folder / "tokenizer_config.json"
    if settings.exists():
        fields = ConfigFields(read_json(settings), str(settings))
        if not isinstance(fields.values.get("chat_template"), list):  # a list holds several, each with its name
            fields.text("chat_template", "")
    try:
        with time_limit(MOST_SECONDS_OF_READING):
            _require_files(folder)
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if (folder / "chat_template.jinja").exists() and not tokenizer.chat_template:
            raise ValueError("chat_template.jinja is empty")
        return tokenizer if tokenizer.chat_template else None
    except Exception as error:  # broken files make transformers raise anything
        reason = _short(describe_error(error))
        raise UserError(
            f"{settings}: transformers cannot read the tokenizer in this folder without running the checkpoint's own "
            f"code ({reason}); fetch tokenizer and config.json again"
        ) from error


def _require_files(folder: Path) -> None:
    """Require that the folder has only regular files and folders, since transformers would wait forever for a pipe."""
    for path in folder.iterdir():
        if not path.is_dir():
            path.open("rb").close()


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


def _short(reason: str) -> str:
    text = one_line(reason)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _as_it_is(texts: Sequence[str], system: str | None) -> Rendered:
    """Render without a template. The model was trained without turns, so a conversation becomes one text with a
    paragraph for each turn."""
    return Rendered("\n\n".join(texts if system is None else [system, *texts]), has_special_tokens=False)
