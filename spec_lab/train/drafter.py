"""What a drafter's recipe says of it for its card."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrafterDescription:
    """A drafter's part of its card, in Markdown without headings.

    `kind`: its name with an article, such as "an EAGLE-3 head". `reading`: paragraphs about its sizes, its inputs and
    what it feeds back. `loss`: the words of the card about the loss, such as "over 5 steps of ...".
    """

    kind: str
    reading: str
    loss: str
