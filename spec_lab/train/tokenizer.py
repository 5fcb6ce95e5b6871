"""The pocket tokenizer: byte-level BPE with single digits, the chat markers and a chat template."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from spec_lab.corpus.example import (
    ASSISTANT,
    CHAT_TEMPLATE,
    END_OF_TEXT,
    END_OF_TURN,
    SPECIAL_TOKENS,
    THINK_END,
    THINK_START,
    USER,
)
from spec_lab.train.module_config import MAX_LENGTH

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a BPE over `texts` with at most `vocab_size` entries, markers included.

    Every digit is a separate token, so a number's length is its number of digits. The thinking markers are plain added
    tokens, as in Qwen3. So decoding without special tokens keeps them, and the text still shows where thinking ends.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    thinking_markers = (THINK_START, THINK_END)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(thinking_markers),
        special_tokens=[marker for marker in SPECIAL_TOKENS if marker not in thinking_markers],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in thinking_markers])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
