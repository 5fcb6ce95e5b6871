"""The target's tokenizer, which converts text to ids and back, and prompts to the form that the model expects."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.gguf_tokenizer import gguf_tokenizer
from spec_lab.core.errors import UserError
from spec_lab.workloads.chat_template import ChatTemplate, Rendered, stored_template
from spec_lab.workloads.pocket_form import CHAT_TEMPLATE, SPECIAL_TOKENS, Form, render_conversation, render_prompt

if TYPE_CHECKING:
    import tokenizers


Render = Callable[[Form, Sequence[str], str | None], Rendered]


class Tokenizer(Protocol):
    """Converts text to ids and back."""

    vocab_size: int
    template: str | None
    """The text of the chat template."""

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
        self.template: str | None = None

    def special_id(self, token: str) -> int | None:
        return None

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError("this target has no tokenizer; use workload=random_ids")

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def encode_prompt(self, form: Form, prompt: str, system: str | None = None) -> list[int]:
        return self.encode(prompt)

    def encode_conversation(self, texts: Sequence[str], system: str | None = None) -> list[int]:
        return self.encode(texts[0])


class TargetTokenizer:
    """A `tokenizer.json` or the tokenizer of a GGUF file, together with the model's chat template."""

    def __init__(self, folder: Path, thinking: bool | None = None) -> None:
        """Read the tokenizer of a folder or of a GGUF file; UserError for a `thinking` that its template lacks.

        `thinking` is passed to the chat template; None passes nothing.
        """
        self._folder = folder
        self._tokenizer = gguf_tokenizer(folder) if is_gguf(folder) else _from_json(folder / "tokenizer.json")
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        has_markers = all(self.special_id(token) is not None for token in SPECIAL_TOKENS)
        self.template = template = stored_template(folder)
        is_ours = has_markers and template in (None, CHAT_TEMPLATE)
        own = ChatTemplate(folder, thinking)
        if thinking is not None and (is_ours or not own.has_switch()):
            raise UserError(f"workload.thinking={thinking}: the chat template of {folder} has no switch; leave it out")
        self._render: Render = _render_ours if is_ours else own

    def special_id(self, token: str) -> int | None:
        """Return the id of a text that is a single token, such as `<think>`; None if there is no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without BOS."""
        return self._ids(text, add_special_tokens=False)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Do the same as `encode` for each text, on all cores."""
        return [found.ids for found in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def digest(self) -> str:
        """Return a digest that identifies this tokenizer."""
        return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def encode_prompt(self, form: Form, prompt: str, system: str | None = None) -> list[int]:
        """Return the ids of a chat turn or of a text to continue, with BOS if the model was trained with it.

        Raises:
            UserError: the prompt already begins with the special token that is added here.
        """
        ids = self._encode(form, [prompt], system)
        self._refuse_doubled(prompt, ids)
        return ids

    def encode_conversation(self, texts: Sequence[str], system: str | None = None) -> list[int]:
        """Return the ids of a chat. Its turns alternate between user and assistant, and the last is the user's."""
        return self._encode("chat", texts, system)

    def render_conversation(self, texts: Sequence[str], system: str | None = None) -> Rendered:
        """Return the text of a chat, as `encode_rendered` takes it; UserError if it leaves out a message."""
        return self._rendered("chat", texts, system)

    def encode_rendered(self, rendered: Rendered) -> list[int]:
        """Return the ids of a rendered prompt, with special tokens exactly once."""
        return self._ids(rendered.text, add_special_tokens=not rendered.has_special_tokens)

    def _encode(self, form: Form, texts: Sequence[str], system: str | None) -> list[int]:
        return self.encode_rendered(self._rendered(form, texts, system))

    def _rendered(self, form: Form, texts: Sequence[str], system: str | None) -> Rendered:
        rendered = self._render(form, texts, system)
        if any(said.strip() not in rendered.text for said in (system or "", texts[-1])):
            raise UserError(f"the chat template of {self._folder} leaves out the user's message or the system prompt")
        return rendered

    def _refuse_doubled(self, prompt: str, ids: Sequence[int]) -> None:
        """Refuse a text to which a template was already applied, since it would have BOS and the turn markers twice."""
        first = self._tokenizer.id_to_token(ids[0]) if ids else None
        if first is None or not prompt.lstrip().startswith(first):
            return
        added = self._tokenizer.get_added_tokens_decoder().get(ids[0])
        if added is None or not added.special:
            return
        if list(ids) != self.encode(prompt):
            raise UserError(f"{prompt[:40]!r} begins with {first}, which the tokenizer adds too; leave it out")

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


def num_other_tokens(folder: Path, other: Path) -> int | None:
    """Return how many ids mean other tokens in two tokenizers, each of a folder or a GGUF file; None if one has
    none."""
    paths = [path if is_gguf(path) else path / "tokenizer.json" for path in (folder, other)]
    if not all(path.is_file() for path in paths):
        return None
    one, two = ((gguf_tokenizer(path) if is_gguf(path) else _from_json(path)) for path in paths)
    tokens = {token_id: token for token, token_id in one.get_vocab().items()}
    return sum(tokens.get(token_id, token) != token for token, token_id in two.get_vocab().items())


def _from_json(path: Path) -> tokenizers.Tokenizer:
    """Read a `tokenizer.json`. Its settings for truncation and padding, which are for training, are ignored."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _render_ours(form: Form, texts: Sequence[str], system: str | None = None) -> Rendered:
    """Render without the system prompt, for which the shipped targets have no place."""
    text = render_prompt(form, texts[0]) if form == "continue" else render_conversation(texts)
    return Rendered(text, has_special_tokens=True)
