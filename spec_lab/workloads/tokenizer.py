"""The target's tokenizer, which converts text to ids and back, and prompts to the form that the model expects."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.gguf_tokenizer import gguf_tokenizer
from spec_lab.core.errors import UserError, one_line
from spec_lab.workloads.chat_template import ChatTemplate, Rendered, stored_template
from spec_lab.workloads.pocket_form import CHAT_TEMPLATE, SPECIAL_TOKENS, Form, render_conversation, render_prompt
from spec_lab.workloads.unusable import NO_SYSTEM, UnusablePrompt

if TYPE_CHECKING:
    import tokenizers


Render = Callable[[Form, Sequence[str], str | None], Rendered]


class Tokenizer(Protocol):
    """Converts text to ids and back."""

    vocab_size: int

    def special_id(self, token: str) -> int | None:
        """Return the id of a text that is a single token, such as `<think>`; None if there is no such token."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without BOS."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of some ids."""
        ...

    def encode_prompt(self, form: Form, prompt: str, system: str | None = None) -> list[int]:
        """Return the ids of a chat turn or of a text to continue, with BOS if the model was trained with it.

        `system` is the system prompt of a chat.
        """
        ...

    def encode_conversation(self, texts: Sequence[str], system: str | None = None) -> list[int]:
        """Return the ids of a chat. Its turns alternate between user and assistant, and the last is the user's."""
        ...


class IdsAlone:
    """Stands in for the tokenizer of a target without one, whose prompts are ids. Text is refused."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def special_id(self, token: str) -> int | None:
        return None

    def encode(self, text: str) -> list[int]:
        raise UserError("this target has no tokenizer, so texts cannot be read; use workload=random_ids")

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def encode_prompt(self, form: Form, prompt: str, system: str | None = None) -> list[int]:
        return self.encode(prompt)

    def encode_conversation(self, texts: Sequence[str], system: str | None = None) -> list[int]:
        return self.encode(texts[0])


class TargetTokenizer:
    """A `tokenizer.json` or the tokenizer of a GGUF file, together with the model's chat template."""

    def __init__(self, folder: Path, thinking: bool | None = None) -> None:
        """Read the tokenizer of a folder or of a GGUF file; UserError if it cannot be used.

        `thinking` is passed to the chat template; None passes nothing.
        """
        self._path = folder if is_gguf(folder) else folder / "tokenizer.json"
        with _defects_of(f"{self._path} cannot be read as a tokenizer"):
            self._tokenizer = gguf_tokenizer(folder) if is_gguf(folder) else _from_json(self._path)
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        has_markers = all(self.special_id(token) is not None for token in SPECIAL_TOKENS)
        template = stored_template(folder)
        if thinking is not None and "enable_thinking" not in (template or ""):
            raise UserError(
                f"thinking={thinking}: the chat template of {folder} does not have this choice; use thinking=null"
            )
        is_ours = has_markers and template in (None, CHAT_TEMPLATE)
        self._render: Render = _render_ours if is_ours else ChatTemplate(folder, thinking=thinking)

    def special_id(self, token: str) -> int | None:
        """Return the id of a text that is a single token, such as `<think>`; None if there is no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without BOS."""
        return self._ids(text, add_special_tokens=False)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Do the same as `encode` for each text, on all cores."""
        with _defects_of(f"{self._path} cannot encode a prompt"):
            return [found.ids for found in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def digest(self) -> str:
        """Return a digest that identifies this tokenizer."""
        return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def encode_prompt(self, form: Form, prompt: str, system: str | None = None) -> list[int]:
        """Return the ids of a chat turn or of a text to continue, with BOS if the model was trained with it.

        Raises:
            UnusablePrompt: the prompt already begins with the special token that is added here.
        """
        ids = self._encode(form, [prompt], system)
        self._refuse_doubled(prompt, ids)
        return ids

    def encode_conversation(self, texts: Sequence[str], system: str | None = None) -> list[int]:
        """Return the ids of a chat. Its turns alternate between user and assistant, and the last is the user's."""
        return self._encode("chat", texts, system)

    def _encode(self, form: Form, texts: Sequence[str], system: str | None) -> list[int]:
        rendered = self._render(form, texts, system)
        return self._ids(rendered.text, add_special_tokens=not rendered.has_special_tokens)

    def _refuse_doubled(self, prompt: str, ids: Sequence[int]) -> None:
        """Refuse a text to which a template was already applied, since it would have BOS and the turn markers twice."""
        first = self._tokenizer.id_to_token(ids[0]) if ids else None
        if first is None or not prompt.lstrip().startswith(first) or ids[0] not in self._special_ids():
            return
        if list(ids) != self.encode(prompt):
            raise UnusablePrompt(
                f"the prompt begins with {first}, which the target's tokenizer also "
                "puts at the beginning; leave out the text "
                f"that a chat template has added"
            )

    def _special_ids(self) -> set[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token_id for token_id, token in added.items() if token.special}

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        with _defects_of(f"{self._path} cannot encode a prompt"):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


def _from_json(path: Path) -> tokenizers.Tokenizer:
    """Read a `tokenizer.json`. Its settings for truncation and padding, which are for training, are ignored."""
    from tokenizers import Tokenizer

    if not path.is_file():
        raise UserError(f"{path} is missing; target.path must be a checkpoint folder with a tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def _defects_of(what: str) -> Iterator[None]:
    """Raise UserError for a defect of the file. The library raises a bare Exception, or a panic that is not
    an Exception."""
    try:
        yield
    except (UserError, ImportError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what} ({one_line(error)}); fetch it again") from error


def _render_ours(form: Form, texts: Sequence[str], system: str | None = None) -> Rendered:
    if system is not None:
        raise UnusablePrompt(f"this target was trained without system prompts; {NO_SYSTEM}")
    text = render_prompt(form, texts[0]) if form == "continue" else render_conversation(texts)
    return Rendered(text, has_special_tokens=True)
