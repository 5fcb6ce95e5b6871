"""Shows a few texts as they will be learnt from, with the tokens that count marked."""

from __future__ import annotations

from itertools import groupby

from spec_lab.core.errors import UserError, visible
from spec_lab.train.texts.folder import Texts
from spec_lab.workloads.tokenizer import Tokenizer

BEGIN, END = "\x1b[7m", "\x1b[0m"
PLAIN_BEGIN, PLAIN_END = "[[", "]]"


def show_texts(texts: Texts, tokenizer: Tokenizer, number: int, in_colour: bool) -> str:
    """Return the first `number` texts, with supervised tokens marked, and the share of supervised tokens in all texts.

    Marked tokens are in inverted colours, or in double brackets.

    Raises:
        UserError: no token or every token is supervised, so prompts and answers were not separated.
    """
    is_supervised = texts.supervised()
    share = float(is_supervised.float().mean()) if len(is_supervised) else 0.0
    if not 0 < share < 1:
        what = "every token counts, prompts too" if share else "no token counts"
        raise UserError(f"of these texts {what}; write them again")
    begin, end = (BEGIN, END) if in_colour else (PLAIN_BEGIN, PLAIN_END)
    parts = []
    for index in range(min(number, len(texts))):
        first, last = int(texts.starts[index]), int(texts.starts[index + 1])
        tokens = zip(texts.tokens[first:last].tolist(), is_supervised[first:last].tolist(), strict=True)
        shown = ""
        for counts, group in groupby(tokens, key=lambda pair: pair[1]):
            text = visible(tokenizer.decode([token for token, _ in group]), keep="\n\t")
            shown += f"{begin}{text}{end}" if counts else text
        parts.append(f"text {index} of {len(texts)}, {last - first} tokens\n{shown}\n")
    return "\n".join([*parts, f"{share:.1%} of {len(is_supervised)} tokens are supervised"])
