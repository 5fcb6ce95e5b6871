"""The form a prompt takes: our own turns, a checkpoint's chat template, and BOS exactly once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spec_lab.checkpoints.packaged import ZOO
from spec_lab.core.errors import UserError
from spec_lab.workloads.chat_template import stored_template
from spec_lab.workloads.pocket_form import (
    ASSISTANT,
    CHAT_TEMPLATE,
    END_OF_TEXT,
    END_OF_TURN,
    SPECIAL_TOKENS,
    THINK_END,
    THINK_START,
    USER,
    Form,
)
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


def test_texts_are_neither_cut_nor_filled_up(tmp_path: Path) -> None:
    """As in transformers: a file may say how its texts were once brought to one length."""
    make_tokenizer(tmp_path, TEMPLATE)
    path = tmp_path / "tokenizer.json"
    padding = {"strategy": {"Fixed": 9}, "direction": "Left", "pad_id": 0, "pad_type_id": 0, "pad_token": "?"}
    truncation = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    sizes = {"truncation": truncation, "padding": padding | {"pad_to_multiple_of": None}}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    tokenizer, text = TargetTokenizer(tmp_path), "once upon a time"
    assert tokenizer.decode(tokenizer.encode_prompt("continue", text)) == f"{BOS} {text}"
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch([text, "once"])] == [text, "once"]


def test_a_text_to_continue_begins_with_bos(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, TEMPLATE)
    assert tokenizer.decode(tokenizer.encode_prompt("continue", "once upon")) == f"{BOS} once upon"
    assert tokenizer.decode(tokenizer.encode("once upon")) == "once upon"


def test_a_checkpoint_with_the_shipped_markers_and_a_template_of_its_own_has_its_own(tmp_path: Path) -> None:
    """A missing template, or the shipped one, is ours; a broken one is refused, and not passed over."""
    assert stored_template(ZOO / "pocket") == CHAT_TEMPLATE
    for template in (CHAT_TEMPLATE, None):
        ours = make_tokenizer(tmp_path, template, SPECIAL_TOKENS)
        assert ours.decode(ours.encode_prompt("chat", "a time")).startswith(f"{USER} a time {END_OF_TURN}")
    own = make_tokenizer(tmp_path, TEMPLATE, SPECIAL_TOKENS)
    assert own.decode(own.encode_prompt("chat", "a time")) == f"{BOS} {TURN} a time"


def test_a_system_prompt_is_the_templates_first_turn_in_every_turn_of_a_chat(tmp_path: Path) -> None:
    with_roles = TEMPLATE.replace("{{ message['content'] }}", " {{ message['role'] }} {{ message['content'] }} ")
    tokenizer = make_tokenizer(tmp_path, with_roles, ("system", "user", "assistant"))
    first = f"{BOS} {TURN} system upon {TURN} user once"
    assert tokenizer.decode(tokenizer.encode_prompt("chat", "once", "upon")) == first
    later = tokenizer.decode(tokenizer.encode_conversation(["once", "a", "time"], "upon"))
    assert later == f"{first} {TURN} assistant a {TURN} user time"
    base = make_tokenizer(tmp_path, None)
    assert base.decode(base.encode_prompt("chat", "once", "upon")) == f"{BOS} upon once"
    with pytest.raises(UserError, match="leaves out"):
        TargetTokenizer(ZOO / "pocket").encode_prompt("chat", "Hi", "Be brief.")


def test_a_base_model_reads_a_conversation_as_one_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, None)
    assert tokenizer.decode(tokenizer.encode_conversation(["once", "upon", "a"])) == f"{BOS} once upon a"


def test_the_pocket_target_gets_a_conversation_in_its_own_turns() -> None:
    tokenizer = TargetTokenizer(ZOO / "pocket")
    text = tokenizer.decode(tokenizer.encode_conversation(["Hi", f"{THINK_START}hm{THINK_END}\nHo", "So"]))
    user, assistant = (f"{role}\n" for role in (USER, ASSISTANT))
    assert text == f"{user}Hi{END_OF_TURN}\n{assistant}Ho{END_OF_TURN}\n{user}So{END_OF_TURN}\n{assistant}"
    assert tokenizer.encode_conversation(["Hi"]) == tokenizer.encode_prompt("chat", "Hi")


@pytest.mark.parametrize(("form", "template"), [("chat", TEMPLATE), ("chat", None), ("continue", TEMPLATE)])
@pytest.mark.parametrize("before", ["", " "])
def test_a_prompt_that_has_been_through_a_template_is_refused(
    form: Form, template: str | None, before: str, tmp_path: Path
) -> None:
    """It would have two BOS, and its turn's marker twice."""
    tokenizer = make_tokenizer(tmp_path, template)
    with pytest.raises(UserError, match=BOS):
        tokenizer.encode_prompt(form, f"{before}{BOS} {TURN} a time")


def test_a_bos_that_nobody_else_puts_in_front_is_left(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, None)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    tokenizer = TargetTokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_prompt("continue", f"{BOS} a time")) == f"{BOS} a time"


def test_one_marker_in_common_with_ours_does_not_make_a_tokenizer_ours(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, TEMPLATE, extra=(USER,))
    assert tokenizer.special_id(USER) is not None
    assert tokenizer.decode(tokenizer.encode_prompt("chat", "a time")) == f"{BOS} {TURN} a time"


def test_the_pocket_target_gets_its_own_turns() -> None:
    tokenizer = TargetTokenizer(ZOO / "pocket")
    assert tokenizer.decode(tokenizer.encode_prompt("chat", "Hello")).startswith(f"{USER}\nHello")
    assert tokenizer.decode(tokenizer.encode_prompt("continue", "Hello")) == f"{END_OF_TEXT}Hello"


@pytest.mark.parametrize(
    "template",
    [
        "hello",
        TURN
        + "{% for part in messages[-1].content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}",
        TURN
        + "{% for message in messages %}{% if message.role != 'user' %}{{ message.content }}{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_leaves_out_the_message_is_refused(template: str, tmp_path: Path) -> None:
    """As one that expects parts of a text and an image."""
    with pytest.raises(UserError, match="leaves out"):
        make_tokenizer(tmp_path, template).encode_prompt("chat", "a time")
