"""A recorded request cut into its rounds, and those into tokens with their text and origin."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

from spec_lab.core.errors import UserError, one_line, visible
from spec_lab.core.origins import TokenOrigin
from spec_lab.record.reading import read_request_rows, read_summary
from spec_lab.record.row_schema import RequestRow


@dataclass(frozen=True, slots=True)
class Token:
    """One output token.

    Attributes:
        text: the text that it added; None if unknown. Empty if it added none: a later token may complete its character.
        origin: None if unknown, as in records before schema version 4.
    """

    token_id: int
    text: str | None
    origin: TokenOrigin | None

    @property
    def shown(self) -> str:
        """Return its text in printable characters, or its id if it has none."""
        if not self.text:
            return f"<{self.token_id}>"
        return visible(self.text)


@dataclass(frozen=True, slots=True)
class ShownRound:
    """The tokens that one round emitted; round 0 is the prompt pass.

    Attributes:
        num_accepted: drafts that the rule accepted, before any cut; None for the prompt pass.
        num_offered: drafts that it could have accepted; None if not recorded.
    """

    number: int
    num_accepted: int | None
    num_offered: int | None
    tokens: list[Token]


@dataclass(frozen=True, slots=True)
class ShownRequest:
    """A request to show.

    Attributes:
        num_draft_tokens: K; None if not recorded.
    """

    row: RequestRow
    num_draft_tokens: int | None
    rounds: list[ShownRound]

    @property
    def tokens(self) -> list[Token]:
        """Return all tokens of the output."""
        return [token for part in self.rounds for token in part.tokens]

    @property
    def heading(self) -> str:
        """Return a line that names the request and gives its results."""
        row, emitted = self.row, self.row["emitted_per_round"]
        length = f", {sum(emitted) / len(emitted):.2f} tokens a round" if emitted else ""
        return one_line(
            f"{row['id']} ({row['category']}): {len(row['prompt_ids'])} prompt tokens, {len(row['output_ids'])} output "
            f"tokens in {len(emitted)} rounds{length}, ended by {row['finish_reason']}"
        )

    def describe_round(self, part: ShownRound) -> str:
        """Return `prompt pass`, or how many drafts were accepted."""
        if part.num_accepted is None:
            return "prompt pass"
        num_drafts = self.num_draft_tokens if part.num_offered is None else part.num_offered
        of = "" if num_drafts is None else f" of {num_drafts}"
        cut = ", cut" if len(part.tokens) < part.num_accepted + 1 else ""
        return f"round {part.number}: {part.num_accepted}{of}{cut}"


def load_request(folder: Path, request_id: str) -> ShownRequest:
    """Read the request with this id from the run in `folder`.

    Raises:
        UserError: there is no such run or request, or its record is broken.
    """
    num_draft_tokens = read_summary(folder)["num_draft_tokens"]
    rows = read_request_rows(folder)
    row = next((row for row in rows if row["id"] == request_id), None)
    if row is None:
        raise UserError(f"{folder}: no request {request_id!r}{_hint(request_id, [row['id'] for row in rows])}")
    return ShownRequest(row, num_draft_tokens, list(_rounds(row)))


def _hint(request_id: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(request_id, known, n=3) or list(known[:3])
    return f"; it has {len(known)}, such as {', '.join(near)}" if known else "; it has none"


def _rounds(row: RequestRow) -> Iterator[ShownRound]:
    tokens = list(_tokens(row))
    yield ShownRound(0, None, None, tokens[:1])
    at = 1
    offered = row.get("offered_per_round") or repeat(None, len(row["accepted_per_round"]))
    counts = zip(row["accepted_per_round"], offered, row["emitted_per_round"], strict=True)
    for number, (num_accepted, num_offered, num_emitted) in enumerate(counts, start=1):
        yield ShownRound(number, num_accepted, num_offered, tokens[at : at + num_emitted])
        at += num_emitted


def _tokens(row: RequestRow) -> Iterator[Token]:
    ids, ends, origins = row["output_ids"], row.get("text_ends"), row.get("token_origins")
    starts = None if ends is None else [0, *ends[:-1]]
    for index, token_id in enumerate(ids):
        text = None if ends is None or starts is None else row["text"][starts[index] : ends[index]]
        yield Token(token_id, text, None if origins is None else TokenOrigin(origins[index]))
