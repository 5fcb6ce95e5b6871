"""The target's tokenizer: text to ids and back, and the form a prompt takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spec_lab.corpus.example import SPECIAL_TOKENS, Form, render_prompt
from spec_lab.errors import UserError


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
            raise UserError(f"{path} cannot be read as a tokenizer: {error}") from error
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        is_ours = all(self.special_id(token) is not None for token in SPECIAL_TOKENS)
        self._render: Callable[[Form, str], _Rendered] = _render_ours if is_ours else _ChatTemplate(folder)

    def special_id(self, token: str) -> int | None:
        """The id of a token that is one, such as `<think>`; None where the tokenizer has no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode(self, text: str) -> list[int]:
        """The ids of the text alone, without a BOS in front."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def encode_prompt(self, form: Form, prompt: str) -> list[int]:
        """The ids of a chat turn or of a text to continue, with the BOS that the model was trained with."""
        rendered = self._render(form, prompt)
        return self._tokenizer.encode(rendered.text, add_special_tokens=not rendered.has_special_tokens).ids


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The text of a prompt, and whether it already spells the special tokens that the tokenizer would add (BOS)."""

    text: str
    has_special_tokens: bool


def _render_ours(form: Form, prompt: str) -> _Rendered:
    return _Rendered(render_prompt(form, prompt), has_special_tokens=True)


class _ChatTemplate:
    """A checkpoint's own chat template, which spells BOS itself; a text to continue is left as it is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._apply: Callable[[str], _Rendered] | None = None

    def __call__(self, form: Form, prompt: str) -> _Rendered:
        if form == "continue":
            return _as_it_is(prompt)
        if self._apply is None:
            self._apply = self._load()
        return self._apply(prompt)

    def _load(self) -> Callable[[str], _Rendered]:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{self._folder}: its chat template cannot be read ({reason}); fetch it again") from error
        if not tokenizer.chat_template:
            return _as_it_is

        def apply(prompt: str) -> _Rendered:
            turns = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            return _Rendered(str(text), has_special_tokens=True)

        return apply


def _as_it_is(prompt: str) -> _Rendered:
    return _Rendered(prompt, has_special_tokens=False)
