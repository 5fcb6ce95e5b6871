"""The tokenizer of a GGUF file against byte-pair encoding written out plainly, its special tokens and its template."""

from __future__ import annotations

import random
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex

from spec_lab.checkpoints.gguf_tokenizer import CUTTINGS
from spec_lab.core.errors import UserError
from spec_lab.workloads.tokenizer import TargetTokenizer
from tests.tiny_gguf import ALPHABET, BYTES, MERGES, tokenizer_keys, write_head

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
LLAMA3 = WORDS + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WAYS = {
    "gpt-2": (None, GPT2),
    "smollm": (r"\p{N}", GPT2),
    "llama-bpe": (None, LLAMA3),
    "qwen2": (None, LLAMA3.replace("{1,3}", "")),
    "qwen35": (None, QWEN35),
    "gpt-4o": (None, GPT4O),
}
COMPOSED = ("qwen2", "qwen35")
TEXTS = (
    "the once  12 the 7  7 7\n\n\n 777 and 1234567",
    "  7 seven",
    " 7",
    "it's IT'S the1the 2 the    the\tthe\r\n x",
    "Ωμέγα ½ ② 世界 e\u0301 é naïve — “quoted”  😀 1️⃣",
    "",
    "   ",
    "theOnce HTTPServer'S x\u0301y\u0301 .\u0301 a/b//\n",
    "<think>the</think><|im_start|>7",
)


def spelled(text: str) -> list[str]:
    """The text's bytes, each a character as GPT-2 spells it."""
    others = [byte for byte in range(256) if byte not in BYTES]
    by_byte = dict(zip([*BYTES, *others], ALPHABET, strict=True))
    return [by_byte[byte] for byte in text.encode()]


class Rules:
    """A vocabulary and its merges."""

    def __init__(self, tokens: list[str], merges: tuple[str, ...]) -> None:
        self.tokens = tokens
        self.known = frozenset(tokens)
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.special = [token for token in tokens if token.startswith("<|") or token == "<think>"]

    def merged(self, piece: list[str], takes_whole: bool) -> list[str]:
        """Join the pair whose merge comes first, as long as there is one."""
        if takes_whole and "".join(piece) in self.known:
            return ["".join(piece)]
        while True:
            pairs = [(self.ranks[pair], at) for at, pair in enumerate(pairwise(piece)) if pair in self.ranks]
            if not pairs:
                return piece
            _, at = min(pairs)
            piece = [*piece[:at], piece[at] + piece[at + 1], *piece[at + 2 :]]


def plainly(text: str, pre: str, rules: Rules) -> list[str]:
    """The tokens of a text by the rules alone."""
    digits, words = WAYS[pre]
    found: list[str] = []
    for part in regex.split("(" + "|".join(map(regex.escape, rules.special)) + ")", text):
        if part in rules.special:
            found.append(part)
            continue
        part = unicodedata.normalize("NFC", part) if pre in COMPOSED else part
        cut = regex.split(f"({digits})", part) if digits else [part]
        for piece in (piece for each in cut for piece in regex.findall(words, each)):
            found += rules.merged(spelled(piece), takes_whole=pre in ("llama-bpe", "gpt-4o"))
    return found


def make(path: Path, pre: str = "smollm", **changes: Any) -> TargetTokenizer:
    keys = tokenizer_keys(300, pre) | {key.replace("__", "."): value for key, value in changes.items()}
    return TargetTokenizer(write_head(path, keys))


@pytest.mark.parametrize("pre", WAYS)
def test_ids_follow_from_the_rules_of_each_cutting(pre: str, tmp_path: Path) -> None:
    tokenizer = make(tmp_path / "a.gguf", pre)
    rules = Rules(tokenizer_keys(300, pre)["tokenizer.ggml.tokens"], tuple(MERGES))
    draw = random.Random(0)
    parts = [
        "the",
        " ",
        "  ",
        "7",
        "12",
        "once",
        "\n",
        "'s",
        "'S",
        "é",
        "e\u0301",
        "世",
        "½",
        "!",
        ".\n",
        "\t",
        "<think>",
    ]
    mixed = ["".join(draw.choices(parts, k=draw.randint(1, 12))) for _ in range(100)]
    for text in (*TEXTS, *mixed):
        ids = tokenizer.encode(text)
        assert [rules.tokens[token_id] for token_id in ids] == plainly(text, pre, rules), text
        assert tokenizer.decode(ids) == (unicodedata.normalize("NFC", text) if pre in COMPOSED else text)


def test_two_blanks_before_a_digit_are_one_token_where_digits_are_cut_off(tmp_path: Path) -> None:
    tokens = tokenizer_keys(300, "smollm")["tokenizer.ggml.tokens"]
    pieces = {
        pre: [tokens[token_id] for token_id in make(tmp_path / f"{pre}.gguf", pre).encode("  712")]
        for pre in ("smollm", "gpt-2")
    }
    assert pieces == {"smollm": ["ĠĠ", "7", "1", "2"], "gpt-2": ["Ġ", "Ġ7", "12"]}


def test_every_named_cutting_encodes(tmp_path: Path) -> None:
    for name in CUTTINGS:
        tokenizer = make(tmp_path / f"{name}.gguf", name)
        assert tokenizer.decode(tokenizer.encode("the 12 once")) == "the 12 once"


def test_the_template_is_the_files_and_its_markers_are_single_tokens(tmp_path: Path) -> None:
    tokenizer = make(tmp_path / "a.gguf")
    ids = tokenizer.encode_conversation(["the", "once", "7"])
    start, end = tokenizer.special_id("<|im_start|>"), tokenizer.special_id("<|im_end|>")
    turns = "user\nthe", "assistant\nonce", "user\n7"
    expected = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == expected
    assert (ids.count(start), ids.count(end)) == (4, 3)


@pytest.mark.parametrize(
    ("pre", "says", "first"), [("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", True, True)]
)
def test_a_text_begins_with_bos_where_the_file_or_its_kind_says(
    pre: str, says: bool | None, first: bool, tmp_path: Path
) -> None:
    tokenizer = make(tmp_path / "a.gguf", pre, tokenizer__ggml__add_bos_token=says)
    ids = tokenizer.encode_prompt("continue", "the")
    assert (ids[0] == tokenizer.special_id("<|im_start|>")) is first
    assert tokenizer.encode("the") == (ids[1:] if first else ids)


def test_a_file_without_a_template_takes_the_bare_text(tmp_path: Path) -> None:
    tokenizer = make(tmp_path / "a.gguf", tokenizer__chat_template=None)
    assert tokenizer.encode_prompt("chat", "the once") == tokenizer.encode("the once")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer__ggml__pre": "tekken"}, "tokenizer.ggml.pre 'tekken' is not supported, only 'smollm'"),
        ({"tokenizer__ggml__pre": None}, "tokenizer.ggml.pre ''"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.model 'llama' is not supported, only 'gpt2'"),
        ({"tokenizer__ggml__add_space_prefix": True}, "add_space_prefix"),
    ],
)
def test_what_is_not_understood_is_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason) as refusal:
        make(tmp_path / "a.gguf", **change)
    assert "\n" not in str(refusal.value) and str(tmp_path / "a.gguf") in str(refusal.value)
