"""The target's tokenizer: text to ids and back, and the form a prompt takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from spec_lab.corpus.example import SPECIAL_TOKENS, Form, render_prompt
from spec_lab.errors import UserError, one_line
from spec_lab.workloads.chat_template import ChatTemplate, Rendered


class Tokenizer(Protocol):
    """It turns text into ids and back."""

    vocab_size: int

    def special_id(self, token: str) -> int | None:
        """The id of a token that is one, such as `<think>`; None where there is no such token."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of the text alone, without a BOS in front."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids."""
        ...

    def encode_prompt(self, form: Form, prompt: str) -> list[int]:
        """The ids of a chat turn or of a text to continue, with the BOS that the model was trained with."""
        ...


class IdsAlone:
    """Stands in where a target has random weights and no tokenizer: there are ids, and no text."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def special_id(self, token: str) -> int | None:
        return None

    def encode(self, text: str) -> list[int]:
        raise UserError(
            "this target has random weights and no tokenizer, so there is no text to read; use workload=random_ids"
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def encode_prompt(self, form: Form, prompt: str) -> list[int]:
        return self.encode(prompt)


class TargetTokenizer:
    """A `tokenizer.json`, and how its model wants a chat turn written."""

    def __init__(self, folder: Path) -> None:
        """Read `folder`/tokenizer.json; UserError when it is missing or broken."""
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path} is missing; target.path must be a checkpoint folder with a tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every defect of the file
            raise UserError(f"{path} cannot be read as a tokenizer: {one_line(error)}") from error
        self._path = path
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        is_ours = all(self.special_id(token) is not None for token in SPECIAL_TOKENS)
        self._render: Callable[[Form, str], Rendered] = _render_ours if is_ours else ChatTemplate(folder)

    def special_id(self, token: str) -> int | None:
        """The id of a token that is one, such as `<think>`; None where the tokenizer has no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode(self, text: str) -> list[int]:
        """The ids of the text alone, without a BOS in front."""
        return self._ids(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def encode_prompt(self, form: Form, prompt: str) -> list[int]:
        """The ids of a chat turn or of a text to continue, with the BOS that the model was trained with."""
        rendered = self._render(form, prompt)
        return self._ids(rendered.text, add_special_tokens=not rendered.has_special_tokens)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # as above
            raise UserError(f"{self._path} cannot encode a prompt ({one_line(error)}); fetch it again") from error
        return ids


def _render_ours(form: Form, prompt: str) -> Rendered:
    return Rendered(render_prompt(form, prompt), has_special_tokens=True)
