"""Prompt files: what is read, what is refused and how."""

from __future__ import annotations

import gzip
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_lab.app.compose import compose
from spec_lab.core.errors import UserError
from spec_lab.menu.choices import Unusable
from spec_lab.menu.config import WorkloadConfig
from spec_lab.workloads.load import jsonl_requests, spec_bench_requests
from spec_lab.workloads.prompt_files import PROMPTS_FOLDER, Prompt, read_jsonl, read_spec_bench, shipped_prompts
from tests.one_line import read_or_refused


def read(path: Path, workload: str = "jsonl", **options: Any) -> list[Prompt]:
    config = WorkloadConfig(name=workload, path=str(path), **options)
    return {"jsonl": read_jsonl, "spec_bench": read_spec_bench}[workload](config)


def test_a_line_needs_only_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"prompt": "Hi"}\n\n{"prompt": "Go", "id": "x", "category": "c", "form": "continue", "answer": 4}\n'
    )
    assert read(path) == [Prompt("mine-0000", "mine", "chat", "Hi", None), Prompt("x", "c", "continue", "Go", "4")]


def test_a_chat_is_told_what_its_line_says_else_what_the_workload_says(tmp_path: Path) -> None:
    """A text to continue is told nothing, and a later turn what the first one was."""
    asked: list[tuple[str, str | None]] = []

    class Told:
        def encode_prompt(self, form: str, prompt: str, system: str | None = None) -> list[int]:
            asked.append((prompt, system))
            return [1]

    own = tmp_path / "mine.jsonl"
    own.write_text('{"prompt": "a", "system": "own"}\n{"prompt": "b"}\n{"prompt": "c", "form": "continue"}\n')
    bench = tmp_path / "bench.jsonl"
    bench.write_text('{"question_id": 1, "category": "qa", "turns": ["d", "e"]}')
    tokenizer: Any = Told()
    config = compose(["workload=jsonl", f"workload.path={own}", "workload.system=all"]).config
    assert [request.system for request in jsonl_requests(config, tokenizer)] == ["own", "all", None]
    config = compose(["workload=spec_bench", f"workload.path={bench}", "workload.system=all"]).config
    assert [request.system for request in spec_bench_requests(config, tokenizer)] == ["all"]
    assert asked == [("a", "own"), ("b", "all"), ("c", None), ("d", "all")]
    own.write_text('{"prompt": "c", "form": "continue"}\n')
    config = compose(["workload=jsonl", f"workload.path={own}", "workload.system=all"]).config
    with pytest.raises(UserError, match=r"workload\.system is for chats, but no prompt is a chat; leave it out"):
        jsonl_requests(config, tokenizer)


def test_a_line_may_hold_separators_that_are_no_line_feed_and_a_file_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('\ufeff{"prompt": "one\u2028two\x85"}\r\n', encoding="utf-8", newline="")
    assert [prompt.text for prompt in read(path)] == ["one\u2028two\x85"]


def test_a_file_that_is_not_utf8_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes('{"prompt": "Käse"}\n'.encode("latin-1"))
    with pytest.raises(UserError, match=r"mine\.jsonl is not UTF-8 \(byte 14: .*save it as UTF-8"):
        read(path)
    path.write_bytes(gzip.compress(b'{"prompt": "a"}'))
    with pytest.raises(UserError, match=r"mine\.jsonl is packed; unpack it with gunzip"):
        read(path)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["it's.json", "it's.jsonl"])
def test_the_command_that_an_array_of_prompts_is_refused_with_writes_them_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, indent: int | None
) -> None:
    monkeypatch.chdir(tmp_path)
    text = json.dumps([{"prompt": "a"}, {"prompt": "b"}], indent=indent)
    Path(name).write_text(text)
    with pytest.raises(UserError, match="is one JSON array") as caught:
        read(Path(name))
    _, code, _, source, _, written = shlex.split(str(caught.value).partition("write it with: python ")[2])
    monkeypatch.setattr("sys.stdin", io.StringIO(Path(source).read_text()))
    exec(code)
    assert not Path(written).exists()  # a shell would empty it before it is read
    Path(written).write_text(capsys.readouterr().out)
    assert [prompt.text for prompt in read(Path(written))] == ["a", "b"]
    Path("cut.json").write_text(text[:-1])
    with pytest.raises(UserError, match="it may be cut short, so fetch it again"):
        read(Path("cut.json"))


GOOD = {"jsonl": '{"prompt": "a"}', "spec_bench": '{"question_id": 1, "category": "qa", "turns": ["a"]}'}


@pytest.mark.parametrize(
    ("workload", "content", "message"),
    [
        ("jsonl", "nonsense", "is not JSON"),
        ("jsonl", "[1]", "is not a JSON object"),
        ("jsonl", '{"text": "a"}', "nothing reads `text`"),
        ("jsonl", '{"prompt": ["a"]}', "a line needs a text `prompt`"),
        ("jsonl", '{"prompt": "a", "form": "song"}', "`form` must be chat or continue"),
        ("jsonl", '{"prompt": "a", "form": ["chat"]}', "`form` must be chat or continue"),
        ("jsonl", '{"prompt": "a", "id": null}', "`id`, `category` and `answer` must be"),
        ("jsonl", '{"prompt": "a", "category": {"a": 1}}', "`id`, `category` and `answer` must be"),
        ("jsonl", '{"prompt": "a", "system": ["Be brief."]}', "`system` must be a text, and belongs to a chat"),
        (
            "jsonl",
            '{"prompt": "a", "system": "b", "form": "continue"}',
            "`system` must be a text, and belongs to a chat",
        ),
        ("jsonl", '{"prompt": "a", "answer": [4]}', "`id`, `category` and `answer` must be"),
        ("jsonl", '{"prompt": "a", "answer": true}', "`id`, `category` and `answer` must be"),
        ("jsonl", '{"prompt": "a", "answer": NaN}', "`id`, `category` and `answer` must be"),
        ("jsonl", '{"prompt": "a", "answer": 1e999}', "`id`, `category` and `answer` must be"),
        ("jsonl", '{"prompt": "a", "prompt": "b"}', "the key 'prompt' occurs twice, with 'a' and 'b'"),
        ("jsonl", '{"prompt": " "}', "the `prompt` of a chat must not be empty"),
        ("jsonl", '{"prompt": "\\ud800"}', "is not JSON: it has half of a surrogate pair"),
        ("jsonl", '{"prompt": ' + "[" * 100_000, "is not JSON: it is nested too deeply"),
        ("jsonl", '{"prompt": "a", "answer": ' + "9" * 6000 + "}", "is not JSON: .*6000 digits"),
        ("spec_bench", '{"question_id": 1, "category": "qa", "turns": []}', "turns, a list of texts"),
        ("spec_bench", '{"question_id": 1, "category": "qa", "turns": "hello"}', "turns, a list of texts"),
        ("spec_bench", '{"question_id": 1, "category": "qa", "turns": ["a", " "]}', "turns, a list of texts"),
        (
            "spec_bench",
            '{"question_id": 1, "category": "qa", "turns": ["a"], "answer": 1}',
            "`answer` of a question is not read",
        ),
        ("spec_bench", '{"question_id": 1, "category": "qa", "turns": [null]}', "turns, a list of texts"),
        ("spec_bench", '{"question_id": 1, "category": "qa", "turns": ["a", 5]}', "turns, a list of texts"),
        ("spec_bench", '{"question_id": 1, "category": "qa", "turns": {"0": "a"}}', "turns, a list of texts"),
        ("spec_bench", '{"question_id": 1, "category": "qa", "turns": [""]}', "texts that say something"),
        ("spec_bench", '{"question_id": 1, "category": "qa", "turns": ["a", " "]}', "texts that say something"),
        ("spec_bench", '{"question_id": 1, "category": "qa"}', "a question needs"),
        ("spec_bench", '{"question_id": 1, "turns": ["a"]}', "a question needs question_id, category"),
        ("spec_bench", '{"question_id": null, "category": "qa", "turns": ["a"]}', "a question needs question_id"),
        ("spec_bench", '{"question_id": 1, "category": [], "turns": ["a"]}', "a question needs question_id, category"),
    ],
)
def test_a_broken_line_is_refused_with_its_file_and_number(
    workload: str, content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{GOOD[workload]}\n\n{content}\n")
    with pytest.raises(UserError, match=rf"mine\.jsonl:3:? .*{message}") as caught:
        read(path, workload)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_key_that_nothing_reads_is_refused_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a", "id": 1, "category": "x", "form": "chat", "answer": "b", "system": "Hi"}\n')
    read(path)
    path.write_text('{"prompt": "a", "sytem": "Hi"}\n')
    with pytest.raises(UserError, match="nothing reads `sytem`; did you mean system"):
        read(path)
    path.write_text('{"prompt": "a", "x\\u001b": 1}\n')
    with pytest.raises(UserError) as refused:
        read(path)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("workload", ["jsonl", "spec_bench"])
def test_a_broken_line_is_skipped_where_that_is_asked(
    workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join([GOOD[workload], "nonsense", GOOD[workload], "[1]"]))
    with pytest.raises(UserError, match=r"mine\.jsonl:2 is not JSON: .*workload\.unusable=skip leaves"):
        read(path, workload)
    assert [prompt.text for prompt in read(path, workload, unusable=Unusable.skip)] == ["a", "a"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("mine.jsonl:")[2][:5] for line in lines] == ["2 is ", "4 is "]
    assert all(line.startswith("left out: ") for line in lines)


def test_skipping_is_advised_only_where_something_is_left(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("What is 1 + 1?\nWhat is 2 + 2?\n")
    with pytest.raises(UserError, match=r"mine\.jsonl:1 is not JSON: .*\(no prompt can be used; mend them\)"):
        read(path)


def test_skipping_thousands_of_lines_does_not_say_so_thousands_of_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("nonsense\n" * 1000)
    assert read(path, unusable=Unusable.skip) == []
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 21 and lines[-1] == "left out: 980 more prompts"


def test_so_many_turns_of_a_question_are_read_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question_id": 1, "category": "qa", "turns": ["a", "b", "c"]}')
    asked = {turns: read(path, "spec_bench", turns=turns)[0] for turns in (None, 1, 2)}
    assert {prompt.text for prompt in asked.values()} == {"a"}
    assert {turns: prompt.later_turns for turns, prompt in asked.items()} == {None: ("b", "c"), 1: (), 2: ("b",)}


@pytest.mark.parametrize("workload", ["jsonl", "spec_bench"])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.data())
def test_any_line_is_read_or_refused_in_a_line(workload: str, content: st.DataObject, tmp_path: Path) -> None:
    keys = ("prompt", "id", "category", "form", "answer", "question_id", "turns")
    values = (
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.text(max_size=3))
    )
    row = json.loads(GOOD[workload]) | content.draw(st.dictionaries(st.sampled_from(keys), values, max_size=3))
    lines = st.one_of(st.just(json.dumps(row)), st.text(max_size=20))
    path = tmp_path / "mine.jsonl"
    path.write_text(content.draw(lines), encoding="utf-8", errors="replace")
    prompts = read_or_refused(lambda: read(path, workload), path)
    assert all(isinstance(prompt.text, str) and isinstance(prompt.category, str) for prompt in prompts or ())


def test_the_shipped_prompts_come_one_category_after_the_other() -> None:
    categories = list(dict.fromkeys(prompt.category for prompt in shipped_prompts()))
    assert categories == sorted(path.stem for path in PROMPTS_FOLDER.glob("*.jsonl"))
