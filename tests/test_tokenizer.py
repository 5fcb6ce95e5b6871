"""The form a prompt takes: our own turns, a checkpoint's chat template, and BOS exactly once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spec_lab.assembly.drafters.trained import ZOO
from spec_lab.corpus.example import END_OF_TEXT, USER
from spec_lab.errors import UserError
from spec_lab.workloads.tokenizer import TargetTokenizer

BOS, TURN = "<bos>", "<|turn|>"
TEMPLATE = "{{ bos_token }}{% for message in messages %}" + TURN + "{{ message['content'] }}{% endfor %}"
WORDS = ("once", "upon", "a", "time")


def make_tokenizer(folder: Path, template: str | None, extra: tuple[str, ...] = ()) -> TargetTokenizer:
    """A word-level tokenizer whose post-processor puts BOS in front, as Llama 3's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocab = {word: index for index, word in enumerate((*WORDS, BOS, TURN, "?", *extra))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([BOS, TURN, *extra])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return TargetTokenizer(folder)


def test_a_text_to_continue_begins_with_bos(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, TEMPLATE)
    assert tokenizer.decode(tokenizer.encode_prompt("continue", "once upon")) == f"{BOS} once upon"
    assert tokenizer.decode(tokenizer.encode("once upon")) == "once upon"


def test_a_chat_turn_has_the_bos_of_its_template_and_no_other(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, TEMPLATE)
    assert tokenizer.decode(tokenizer.encode_prompt("chat", "a time")) == f"{BOS} {TURN} a time"


def test_a_base_model_without_a_template_gets_bos_and_the_bare_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, None)
    assert tokenizer.decode(tokenizer.encode_prompt("chat", "a time")) == f"{BOS} a time"


def test_one_marker_in_common_with_ours_does_not_make_a_tokenizer_ours(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, TEMPLATE, extra=(USER,))
    assert tokenizer.special_id(USER) is not None
    assert tokenizer.decode(tokenizer.encode_prompt("chat", "a time")) == f"{BOS} {TURN} a time"


def test_the_pocket_target_gets_its_own_turns() -> None:
    tokenizer = TargetTokenizer(ZOO / "pocket")
    assert tokenizer.decode(tokenizer.encode_prompt("chat", "Hello")).startswith(f"{USER}\nHello")
    assert tokenizer.decode(tokenizer.encode_prompt("continue", "Hello")) == f"{END_OF_TEXT}Hello"


@pytest.mark.parametrize("content", [None, "not a tokenizer"])
def test_a_missing_or_broken_file_is_named(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json (is missing|cannot be read)"):
        TargetTokenizer(tmp_path)
