"""The target's tokenizer: text to ids and back, and the form a prompt takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from spec_lab.workloads.example import USER, Form, render_prompt


class TargetTokenizer:
    """A `tokenizer.json`, and how its model wants a chat turn written."""

    def __init__(self, folder: Path) -> None:
        """Read `folder`/tokenizer.json; ValueError when it is missing or broken."""
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path} is missing; target.path must be a checkpoint folder with a tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every defect of the file
            raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from error
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        knows_our_turns = self._tokenizer.token_to_id(USER) is not None
        self._render: Callable[[Form, str], str] = render_prompt if knows_our_turns else _ChatTemplate(folder)

    def special_id(self, token: str) -> int | None:
        """The id of a token that is one, such as `<think>`; None where the tokenizer has no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def encode_prompt(self, form: Form, prompt: str) -> list[int]:
        """The ids of a chat turn or of a text to continue."""
        return self.encode(self._render(form, prompt))


class _ChatTemplate:
    """A checkpoint's own chat template; a text to continue is left as it is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._apply: Callable[[str], str] | None = None

    def __call__(self, form: Form, prompt: str) -> str:
        if form == "continue":
            return prompt
        if self._apply is None:
            self._apply = self._load()
        return self._apply(prompt)

    def _load(self) -> Callable[[str], str]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        if not tokenizer.chat_template:
            return lambda prompt: prompt

        def apply(prompt: str) -> str:
            turns = [{"role": "user", "content": prompt}]
            return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

        return apply
