"""The form a prompt takes: our own turns, a checkpoint's chat template, and BOS exactly once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_lab.core.errors import UserError
from spec_lab.options.shipped import ZOO
from spec_lab.workloads.chat_template import ChatTemplate, stored_template
from spec_lab.workloads.limits import OutOfBounds, time_limit, within_limits
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
    render_prompt,
)
from spec_lab.workloads.tokenizer import TargetTokenizer
from spec_lab.workloads.unusable import UnusablePrompt
from tests.covering import each_value
from tests.one_line import read_or_refused

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
    with pytest.raises(UserError, match="the chat template cannot be rendered"):
        make_tokenizer(tmp_path, "{% for %}", SPECIAL_TOKENS).encode_prompt("chat", "a time")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: cannot be read as JSON"):
        TargetTokenizer(tmp_path)


def test_a_system_prompt_is_the_templates_first_turn_in_every_turn_of_a_chat(tmp_path: Path) -> None:
    with_roles = TEMPLATE.replace("{{ message['content'] }}", " {{ message['role'] }} {{ message['content'] }} ")
    tokenizer = make_tokenizer(tmp_path, with_roles, ("system", "user", "assistant"))
    first = f"{BOS} {TURN} system upon {TURN} user once"
    assert tokenizer.decode(tokenizer.encode_prompt("chat", "once", "upon")) == first
    later = tokenizer.decode(tokenizer.encode_conversation(["once", "a", "time"], "upon"))
    assert later == f"{first} {TURN} assistant a {TURN} user time"
    base = make_tokenizer(tmp_path, None)
    assert base.decode(base.encode_prompt("chat", "once", "upon")) == f"{BOS} upon once"
    with pytest.raises(UnusablePrompt, match=r"trained without system prompts; .* a turn of the system"):
        TargetTokenizer(ZOO / "pocket").encode_prompt("chat", "Hi", "Be brief.")


def test_a_template_that_takes_no_system_prompt_is_not_broken(tmp_path: Path) -> None:
    none = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer = make_tokenizer(tmp_path, none + TEMPLATE)
    assert tokenizer.decode(tokenizer.encode_prompt("chat", "a time")) == f"{BOS} {TURN} a time"
    with pytest.raises(
        UnusablePrompt,
        match=r"does not take a system prompt \(.*no system "
        r"role.*leave out workload\.system",
    ):
        tokenizer.encode_prompt("chat", "a time", "upon")


def test_a_chat_turn_has_the_bos_of_its_template_and_no_other(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, TEMPLATE)
    assert tokenizer.decode(tokenizer.encode_prompt("chat", "a time")) == f"{BOS} {TURN} a time"


def test_a_base_model_without_a_template_gets_bos_and_the_bare_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, None)
    assert tokenizer.decode(tokenizer.encode_prompt("chat", "a time")) == f"{BOS} a time"


def test_a_conversation_has_one_bos_and_one_marker_a_turn(tmp_path: Path) -> None:
    with_roles = TEMPLATE.replace(TURN, TURN + "{{ ' a ' if message['role'] == 'assistant' else '' }}")
    tokenizer = make_tokenizer(tmp_path, with_roles)
    text = tokenizer.decode(tokenizer.encode_conversation(["once upon", "time", "time"]))
    assert text == f"{BOS} {TURN} once upon {TURN} a time {TURN} time"


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
    with pytest.raises(
        UnusablePrompt,
        match=rf"begins with {BOS}, which the target's tokenizer "
        "also puts at the beginning",
    ):
        tokenizer.encode_prompt(form, f"{before}{BOS} {TURN} a time")


def test_a_pocket_prompt_with_its_markers_is_refused() -> None:
    tokenizer = TargetTokenizer(ZOO / "pocket")
    for form, text in (("chat", render_prompt("chat", "Hi")), ("continue", f"{END_OF_TEXT}Hi")):
        with pytest.raises(UnusablePrompt, match="leave out the text that a chat template has added"):
            tokenizer.encode_prompt(form, text)


def test_a_bos_that_nobody_else_puts_in_front_is_left(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, None)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    tokenizer = TargetTokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_prompt("continue", f"{BOS} a time")) == f"{BOS} a time"


def test_a_file_that_makes_the_library_panic_is_named(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, None)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"]["special_tokens"] = {}
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"tokenizer\.json cannot (be read as a tokenizer|encode a prompt)"):
        TargetTokenizer(tmp_path).encode_prompt("continue", "once upon")


def test_one_marker_in_common_with_ours_does_not_make_a_tokenizer_ours(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, TEMPLATE, extra=(USER,))
    assert tokenizer.special_id(USER) is not None
    assert tokenizer.decode(tokenizer.encode_prompt("chat", "a time")) == f"{BOS} {TURN} a time"


def test_the_pocket_target_gets_its_own_turns() -> None:
    tokenizer = TargetTokenizer(ZOO / "pocket")
    assert tokenizer.decode(tokenizer.encode_prompt("chat", "Hello")).startswith(f"{USER}\nHello")
    assert tokenizer.decode(tokenizer.encode_prompt("continue", "Hello")) == f"{END_OF_TEXT}Hello"


def with_settings(folder: Path, content: Any) -> TargetTokenizer:
    """The tokenizer with another tokenizer_config.json; a text is written as it is."""
    tokenizer = make_tokenizer(folder, TEMPLATE)
    if not isinstance(content, str):
        content = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS} | content)
    (folder / "tokenizer_config.json").write_text(content)
    return tokenizer


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[]", "must hold a JSON object, but holds a list"),
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "nested too deeply"),
        ({"chat_template": 5}, "chat_template must be a string, but is 5"),
        ({"chat_template": {"default": "x"}}, "chat_template must be a string, but is an object"),
        ({"chat_template": [5]}, ""),
        ({"chat_template": ["x"]}, ""),
        ({"chat_template": [{"name": "a"}]}, ""),
        ({"chat_template": [{"name": "tool_use", "template": "x"}]}, "cannot be rendered"),
        ({"tokenizer_class": 5}, ""),
        ({"added_tokens_decoder": 5}, ""),
        ({"added_tokens_decoder": {"x": 5}}, ""),
        ({"chat_template": "{{ raise_exception('only tools') }}"}, "TemplateError: only tools"),
        ({"chat_template": "{% for %}"}, "TemplateSyntaxError"),
        ({"chat_template": "{{ messages[5].content.x }}"}, "UndefinedError"),
        ({"chat_template": "{{ 1 / 0 }}"}, "ZeroDivisionError"),
        ({"chat_template": "{% for i in range(10**9) %}{% endfor %}"}, "OverflowError"),
        ({"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"}, "SecurityError"),
        ({"chat_template": "{{ 'x' * 3000000 }}"}, "more than 1000000 characters"),
        ({"chat_template": "hello"}, "leaves out the user's message"),
    ],
)
def test_broken_settings_and_templates_are_refused_in_a_line_that_names_the_file(
    content: Any, reason: str, tmp_path: Path
) -> None:
    tokenizer = with_settings(tmp_path, content)
    with pytest.raises(UserError) as caught:
        tokenizer.encode_prompt("chat", "a time")
    message = str(caught.value)
    assert str(tmp_path / "tokenizer_config.json") in message and reason in message
    assert "\n" not in message and len(message) < 700


def test_a_template_of_its_own_file_is_the_one_named(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, None)
    (tmp_path / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    with pytest.raises(UserError, match=r"chat_template\.jinja: .*ZeroDivisionError"):
        tokenizer.encode_prompt("chat", "a time")


def test_a_template_of_two_names_is_used_by_its_default(tmp_path: Path) -> None:
    both = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}]
    tokenizer = with_settings(tmp_path, {"chat_template": both})
    assert tokenizer.decode(tokenizer.encode_prompt("chat", "a time")) == f"{BOS} {TURN} a time"


LOOPS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99999) %}{% set ns.x = (ns.x + ns.x)[:900000] %}{% endfor %}",
    "{% macro again() %}{% for i in range(99999) %}{{ again2() }}{% endfor %}{% endmacro %}"
    "{% macro again2() %}{% for i in range(99999) %}{% endfor %}{% endmacro %}{{ again() }}",
)


@pytest.mark.parametrize("template", LOOPS)
def test_a_template_that_does_not_end_is_ended(template: str, tmp_path: Path) -> None:
    make_tokenizer(tmp_path, template)
    with pytest.raises(UserError, match=r"tokenizer_config\.json: .*longer than 0\.1 seconds"):
        ChatTemplate(tmp_path, most_seconds=0.1)("chat", "a time")


HUGE = (
    "{{ 'a' * 10**10 }}",
    "{{ 'a' | center(10**10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ (['a' * 10**6] * 10**4) | join }}",
    "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{{ 10 ** (10 ** 10) }}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
)


@pytest.mark.parametrize(("template", "is_main"), each_value(HUGE, [True, False]))
def test_a_template_takes_neither_all_memory_nor_all_time(template: str, is_main: bool, tmp_path: Path) -> None:
    """In any thread, and within one operation of C, which hears no signal."""
    make_tokenizer(tmp_path, template)
    render = ChatTemplate(tmp_path, most_seconds=0.5)
    with ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match=r"tokenizer_config\.json: .* be rendered"):
        render("chat", "a time") if is_main else pool.submit(render, "chat", "a time").result()


def test_what_is_done_within_limits_leaves_nothing_behind(capfd: pytest.CaptureFixture[str]) -> None:
    """No child, no output twice, and what was unfinished in this process stays so."""
    print("once", end="")
    assert within_limits(lambda: "a\udc80", 60, 2**28) == "a\udc80"
    for work in (lambda: str(1 / 0), lambda: os._exit(3), lambda: signal.raise_signal(signal.SIGKILL)):
        with pytest.raises(OutOfBounds):
            within_limits(work, 60, 2**28)  # type: ignore[arg-type]
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert capfd.readouterr() == ("once", "")


@pytest.mark.parametrize("name", ["chat_template.jinja", "special_tokens_map.json", "tokenizer_config.json"])
def test_a_pipe_in_the_place_of_a_file_of_the_tokenizer_is_named(name: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, TEMPLATE)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="not a regular file") as error:
        tokenizer.encode_prompt("chat", "a time")
    assert name in str(error.value)


def test_a_time_limit_leaves_the_alarm_that_was_set_before() -> None:
    with pytest.raises(TimeoutError, match=r"longer than 5 seconds"), time_limit(5.0):
        with pytest.raises(TimeoutError, match=r"longer than 0\.05"), time_limit(0.05):
            time.sleep(5)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 5
        raise TimeoutError("longer than 5 seconds")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_block_in_another_thread_runs_without_a_limit() -> None:
    done = []

    def work() -> None:
        with time_limit(0.001):
            time.sleep(0.02)
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def test_a_tokenizer_that_cannot_encode_a_text_is_named(tmp_path: Path) -> None:
    write = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(write))
    with pytest.raises(UserError, match=r"tokenizer\.json cannot encode a prompt"):
        TargetTokenizer(tmp_path).encode_prompt("continue", "b")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_tokenizer_file_is_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    make_tokenizer(tmp_path, None)
    path = tmp_path / "tokenizer.json"
    whole = path.read_text()
    start = data.draw(st.integers(0, len(whole) - 1))
    path.write_text(whole[:start] + data.draw(st.text(max_size=3)) + whole[start + data.draw(st.integers(0, 9)) :])
    read_or_refused(lambda: TargetTokenizer(tmp_path).encode_prompt("continue", "once upon"), path)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_settings_are_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    keys = ("chat_template", "bos_token", "eos_token", "added_tokens_decoder", "model_max_length", "tokenizer_class")
    keys += ("auto_map", "extra_special_tokens", "add_bos_token", "clean_up_tokenization_spaces")
    leaves = st.none() | st.booleans() | st.integers(-5, 10**30) | st.floats() | st.text(max_size=4)
    values = leaves | st.lists(leaves, max_size=2) | st.dictionaries(st.text(max_size=3), leaves, max_size=2)
    tokenizer = with_settings(tmp_path, data.draw(st.dictionaries(st.sampled_from(keys), values, max_size=3)))
    read_or_refused(lambda: tokenizer.encode_prompt("chat", "a time"), tmp_path)


@pytest.mark.parametrize("content", [None, "not a tokenizer"])
def test_a_missing_or_broken_file_is_named(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json (is missing|cannot be read)"):
        TargetTokenizer(tmp_path)


@pytest.mark.parametrize("template", [None, "{{ messages[-1].content }}"])
def test_a_template_that_does_not_ask_whether_to_think_is_not_told(template: str | None, tmp_path: Path) -> None:
    shutil.copy(ZOO / "pocket" / "tokenizer.json", tmp_path)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=r"thinking=False: .* does not have this choice; use thinking=null"):
        TargetTokenizer(tmp_path, thinking=False)
    (tmp_path / "chat_template.jinja").write_text("{{ enable_thinking }} {{ messages[-1].content }}")
    assert TargetTokenizer(tmp_path, thinking=False).encode_prompt("chat", "a", None)
