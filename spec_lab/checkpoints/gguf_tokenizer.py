"""The tokenizer in a GGUF file: a byte-level BPE, with the pre-tokenisation that `tokenizer.ggml.pre` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_lab.checkpoints.gguf_file import GgufFile, read_head
from spec_lab.checkpoints.json_input import refuse_values

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MODEL = "tokenizer.ggml.model"
TOKENS = "tokenizer.ggml.tokens"
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
CHAT_TEMPLATE = "tokenizer.chat_template"

# The regular expression of Llama 3, where `{letters}` is what words are made of, and `{digits}` splits runs of digits.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# That of o200k, which splits a word before a capital.
_BEFORE, _AFTER, _ENDING = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
)
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_BEFORE}*{_AFTER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_BEFORE}+{_AFTER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Cutting:
    """A pre-tokenisation: how a text is split into pieces, across which there are no merges.

    Attributes:
        words: the regular expression of the pieces; None is GPT-2's.
        single_digits: whether each digit is split off first, so that a space before a digit is a separate piece.
        whole_pieces: whether a piece that is a token becomes that token even if merges do not produce it.
        composes: whether characters are composed first (NFC), as in the model's own tokenizer; llama.cpp does not.
        adds_bos: whether to add BOS if the file does not say.
    """

    words: str | None = None
    single_digits: bool = False
    whole_pieces: bool = False
    composes: bool = False
    adds_bos: bool = False


LLAMA3 = Cutting(WORDS.format(letters=r"\p{L}", digits=r"\p{N}{1,3}"), whole_pieces=True, adds_bos=True)
SINGLE_DIGITS = Cutting(single_digits=True)
CUTTINGS: Mapping[str, Cutting] = {
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
    "refact": SINGLE_DIGITS,
    "gpt-2": Cutting(),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": Cutting(WORDS.format(letters=r"\p{L}", digits=r"\p{N}"), composes=True),
    "qwen35": Cutting(WORDS.format(letters=r"\p{L}\p{M}", digits=r"\p{N}"), composes=True),
    "gpt-4o": Cutting(O200K, whole_pieces=True),
}


def has_tokenizer(path: Path) -> bool:
    """Return whether the file has a vocabulary in addition to its weights."""
    return TOKENS in read_head(path).metadata


def vocabulary_of(path: Path) -> dict[str, int]:
    """Return the id of each of the file's tokens."""
    return {token: token_id for token_id, token in enumerate(read_head(path).metadata[TOKENS])}


def gguf_tokenizer(path: Path) -> Tokenizer:
    """Build the file's tokenizer.

    Raises:
        UserError: a tokenizer of another kind, or an unknown pre-tokenisation.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    file = read_head(path)
    name, spaces = "tokenizer.ggml.pre", "tokenizer.ggml.add_space_prefix"
    values = {MODEL: "none", name: "", **file.metadata}
    refuse_values(str(path), values, {MODEL: ("gpt2",), name: CUTTINGS, spaces: (False,)})
    cutting = CUTTINGS[values[name]]
    vocabulary = vocabulary_of(path)
    pairs = (line.partition(" ") for line in file.metadata["tokenizer.ggml.merges"])
    merges = [(left, right) for left, _, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=cutting.whole_pieces))
    if cutting.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pieces(cutting)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, file, vocabulary)
    first = _token(file, "bos")
    if first is not None and file.metadata.get("tokenizer.ggml.add_bos_token", cutting.adds_bos):
        named = [(first, file.ids("bos_token_id")[0])]
        tokenizer.post_processor = processors.TemplateProcessing(single=[first, "$A"], special_tokens=named)
    return tokenizer


def chat_template(path: Path) -> str | None:
    """Return the file's chat template; None if it has none."""
    return read_head(path).metadata.get(CHAT_TEMPLATE)


def special_tokens(path: Path) -> dict[str, str]:
    """Return the tokens that a chat template may name, as in `bos_token`."""
    file = read_head(path)
    named = {f"{name}_token": _token(file, key) for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    return {name: token for name, token in named.items() if token is not None}


def _pieces(cutting: Cutting) -> Any:
    from tokenizers import Regex, pre_tokenizers

    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cutting.words is None)
    first: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cutting.single_digits else []
    if cutting.words is not None:
        first.append(pre_tokenizers.Split(Regex(cutting.words), behavior="isolated"))
    return pre_tokenizers.Sequence([*first, bytes_of])


def _add_tokens(tokenizer: Tokenizer, file: GgufFile, vocabulary: Mapping[str, int]) -> None:
    """Add the tokens that are found in a text before it is split into pieces."""
    from tokenizers import AddedToken

    types = file.ids("token_type")
    kinds = dict(zip(vocabulary, types, strict=False))
    special = [token for token, kind in kinds.items() if kind in (UNKNOWN, CONTROL) and token]
    plain = [token for token, kind in kinds.items() if kind == USER_DEFINED and token]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])


def _token(file: GgufFile, name: str) -> str | None:
    """Return the text of the token with this name in the file; the first if there are several."""
    ids, tokens = file.ids(f"{name}_token_id"), file.metadata[TOKENS]
    return tokens[ids[0]] if ids else None
