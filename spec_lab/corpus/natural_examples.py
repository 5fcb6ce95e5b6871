"""Examples of the categories `code` and `prose`: a document that is cut, to be continued."""

from __future__ import annotations

from random import Random

from spec_lab.corpus.example import Example
from spec_lab.corpus.natural import code_documents, prose_documents
from spec_lab.corpus.split import Split

PROMPT_CHARACTERS = (200, 500)
CONTINUATION_CHARACTERS = 480


def draw_natural_example(category: str, split: Split, random: Random) -> Example:
    """Draw a passage of a random document of the split. Documents are drawn in proportion to their length."""
    documents = code_documents(split) if category == "code" else prose_documents(split)
    separator = "\n" if category == "code" else " "
    shortest, longest = PROMPT_CHARACTERS
    while True:
        (document,) = random.choices(documents, weights=_lengths(documents))
        # A prompt begins at the start of a line, and ends after a line (code) or a word (prose).
        start = document.rfind("\n", 0, random.randrange(len(document))) + 1
        cut = document.rfind(separator, start, start + random.randint(shortest, longest)) + (category == "code")
        prompt, continuation = document[start:cut], document[cut : cut + CONTINUATION_CHARACTERS]
        if len(prompt) >= shortest and len(continuation) >= CONTINUATION_CHARACTERS // 2 and _is_plain(prompt):
            return Example(category, "continue", prompt, "", continuation)


def _lengths(documents: tuple[str, ...]) -> list[int]:
    return [len(document) for document in documents]


def _is_plain(text: str) -> bool:
    """Return whether the text is in ASCII, and mostly words rather than tables, rulers or numbers."""
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return text.isascii() and letters >= 0.7 * len(text) and bool(text.strip())
