"""The texts that drafters learn on: written by a tiny target, kept in a folder, packed into rows."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spec_lab.core.errors import UserError, visible
from spec_lab.train.__main__ import main as train
from spec_lab.train.texts.__main__ import main, parse
from spec_lab.train.texts.folder import Texts, TextsFolder
from spec_lab.train.texts.header import TextsHeader, WrittenBy
from spec_lab.train.texts.packing import pack
from spec_lab.train.texts.prompts import Conversation
from spec_lab.train.texts.show import show_texts
from spec_lab.workloads.tokenizer import TargetTokenizer
from tests.tiny_checkpoints import make_tiny_target, refused
from tests.tiny_gguf import write_gguf

SIZES = [
    *("num_texts=12", "max_new_tokens=6", "max_prompt_tokens=200", "batch_size=4", "texts_per_file=4"),
    *("second_turns=0.25", "temperatures=[0,1]", "num_threads=1", "kernels=torch"),
]
IM_END = 2


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    model = make_tiny_target(folder / "hf", "llama", vocab_size=320, num_hidden_layers=1, tie_word_embeddings=False)
    return write_gguf(folder / "tiny.gguf", model, pre="smollm")


def write(target: Path, folder: Path, *words: str) -> int:
    return main(["target=hf", f"target.path={target}", f"output_dir={folder}", *SIZES, *words])


@pytest.fixture(scope="module")
def folder(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts") / "out"
    assert write(target, folder, "graph=round", "graph.rounds_per_replay=4") == 0
    return folder


def test_a_target_writes_texts_that_are_read_packed_and_shown(
    target: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_target_writes_prompts_and_answers(folder)
    prompts_are_read_back_whatever_ends_a_line_elsewhere(folder, tmp_path)
    texts_with_tokens_that_their_target_has_not_are_refused(folder, tmp_path)
    turns_of_a_conversation_are_held_out_together(folder)
    folders_that_writers_filled_side_by_side_are_read_as_one(folder, tmp_path / "side_by_side")
    rows_hold_whole_texts_and_only_what_was_written_counts(folder)
    what_counts_is_shown_and_a_mask_of_everything_refused(target, folder, capsys)


def a_target_writes_prompts_and_answers(folder: Path) -> None:
    texts = Texts.load(folder)
    counts = texts.header.counts("answers")
    assert len(texts) == counts["kept"] == 12
    assert texts.num_written_tokens == counts["tokens"] <= 12 * 6
    assert len(texts.conversations.unique()) == 9  # three of the texts are second turns
    prompts = [json.loads(line) for file in sorted(folder.glob("prompts-*.jsonl")) for line in file.open()]
    assert len({prompt["messages"][0]["content"] for prompt in prompts}) == len(prompts) >= 9
    follow_ups = [json.loads(line) for file in folder.glob("followups-*.jsonl") for line in file.open()]
    assert all([m["role"] for m in line["messages"]] == ["user", "assistant", "user"] for line in follow_ups)


def test_the_same_command_goes_on_and_another_is_refused(
    target: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "out"
    copied.mkdir()
    header = TextsHeader.read(folder)
    with pytest.raises(UserError, match=rf"{folder} is one; use texts={folder}"):
        TextsHeader.read(folder / "prompts-00000.jsonl")
    lost = sorted(name for name in header.files if name.startswith("answers"))[1:]
    for name in header.files:
        (copied / name).write_bytes((folder / name).read_bytes() if name not in lost else b"half a file")
    header.files = {name: counts for name, counts in header.files.items() if name not in lost}
    header.write(copied)
    assert write(target, copied) == 0
    broken = copied / lost[0]
    os.truncate(broken, 20)
    with pytest.raises(UserError, match="delete it"):
        Texts.load(copied)
    broken.unlink()  # what the refusal says
    assert write(target, copied) == 0
    assert torch.equal(Texts.load(copied).tokens, Texts.load(folder).tokens)
    assert write(target, copied, "max_new_tokens=7") == 2
    assert "max_new_tokens" in capsys.readouterr().err


class Killed(BaseException):
    """Ends a command as SIGKILL does: nothing is written behind it."""


def test_one_command_writes_the_texts_and_trains_a_head_on_them(
    target: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["target=hf", f"target.path={target}", "drafter=mtp_eagle", "device=cpu", f"output_dir={tmp_path / 'out'}"]
    words += [f"writing.{word}" for word in SIZES if not word.startswith(("num_threads", "kernels", "batch_size"))]
    words += ["writing.batch_size=3"]  # another way to decode writes the same texts
    words += ["packing.row_length=256", "packing.held_out=0.2", "evaluation.max_new_tokens=4", "evaluation.every=9"]
    steps = ("num_steps=2", "batch_size=2", "log_every=2", "num_warmup_steps=1", "max_seconds=null")
    words += [f"drafter.optimisation.{step}" for step in steps]
    assert train([*words, "--plan"]) == 0
    said = capsys.readouterr().out
    assert "none yet" in said and "  texts" in said and "training" in said and not (tmp_path / "out").exists()
    assert "texts cut" not in said, "texts of the mean length tell nothing about the longest"
    given = [word for word in words if not word.startswith("writing.")]
    assert train([*given, f"texts={folder}", "--plan"]) == 0 and "filled; 0 texts cut" in capsys.readouterr().out
    assert train([*words, "--show-data=2"]) == 2 and "no texts yet" in capsys.readouterr().err

    (tmp_path / "bad.jsonl").write_text('{"prompt": ""}\n')
    assert train([*words, f"prompts=[{tmp_path / 'bad.jsonl'}]"]) == 2 and "left (1 " in capsys.readouterr().err
    assert not (tmp_path / "out" / "checkpoints" / "texts").exists(), "what was refused stands in no other's way"

    add_answers = TextsFolder.add_answers

    def killed(self: TextsFolder, name: str, *parts: Any) -> None:
        if name.endswith("a00001.safetensors"):
            raise Killed
        add_answers(self, name, *parts)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(TextsFolder, "add_answers", killed)
        train(words)
    assert not (tmp_path / "out" / "texts").exists()
    assert train([*words, "writing.max_new_tokens=7", "--plan"]) == 2
    assert "max_new_tokens; choose another output_dir" in capsys.readouterr().err
    assert train([*words, "--plan"]) == 0 and "texts: 2 of a command that was killed" in capsys.readouterr().out
    assert train(words) == 0
    assert "answers a: 2/9 texts, 0 tokens" in capsys.readouterr().err
    assert torch.equal(Texts.load(tmp_path / "out" / "texts").tokens, Texts.load(folder).tokens)
    assert (tmp_path / "out" / "hf-mtp_eagle" / "README.md").exists()


def test_files_of_prompts(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.jsonl"
    said = [
        {"from": "human", "value": "One, two"},
        {"from": "gpt", "value": "x"},
        {"from": "human", "value": "And then"},
    ]
    rows = [
        {"prompt": "How much is it?", "id": 0},
        {"prompt": "how much is it", "id": 0},
        {"prompt": "long " * 100},
        {"messages": [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello there"}]},
        {"conversations": said, "id": 0},  # as the first line of another file
        {"messages": []},
        {"prompt": "Once upon", "form": "continue"},
        {"prompt": "Who is it?", "system": "Be brief"},
    ]
    file.write_text("\n".join([*map(json.dumps, rows), "no json"]))
    assert write(target, tmp_path / "out", f"prompts=[{file}]", "second_turns=0.5") == 0
    texts = Texts.load(tmp_path / "out")
    counts = texts.header.counts("prompts")
    named = ("kept", "duplicate", "too_long", "broken", "without_a_user")
    assert [counts[name] for name in named] == [4, 1, 1, 1, 2]
    assert len(texts) == 5  # four conversations, of which one has a second turn
    kept = [json.loads(line) for line in (tmp_path / "out" / "prompts-00000.jsonl").open()]
    assert len({line["id"] for line in kept}) == 4, "requests are told apart by them"
    told = [message["content"] for line in kept for message in line["messages"] if message["role"] == "system"]
    assert sorted(told) == ["Be brief", "Be kind"]
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question_id": 1, "category": "math", "turns": ["How many?"]}))
    assert write(target, tmp_path / "other", f"prompts=[{questions}]") == 2
    assert "testing" in capsys.readouterr().err


def prompts_are_read_back_whatever_ends_a_line_elsewhere(folder: Path, tmp_path: Path) -> None:
    """A model writes all characters, also those that `str.splitlines` parts lines at."""
    ends = ("\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r", "\n")
    said = [Conversation(str(place), "own", (f"one{end}two",)) for place, end in enumerate(ends)]
    again = TextsFolder(tmp_path / "again", dataclasses.replace(TextsHeader.read(folder), files={}))
    again.add_prompts("prompts-00000.jsonl", said, {"kept": len(said)})
    assert again.read_prompts("prompts") == said


def texts_with_tokens_that_their_target_has_not_are_refused(folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "texts"))
    content = json.loads((copied / "header.json").read_text())
    content["written_by"]["vocab_size"] = 5
    (copied / "header.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="token ids beyond its target's vocabulary"):
        Texts.load(copied)


def turns_of_a_conversation_are_held_out_together(folder: Path) -> None:
    texts = Texts.load(folder)
    rest, held_out = texts.split(0.5, seed=1)
    assert len(rest) + len(held_out) == len(texts) and len(rest) and len(held_out)
    assert not set(rest.conversations.tolist()) & set(held_out.conversations.tolist())
    places = (texts.conversations == held_out.conversations[0]).nonzero()[:, 0]
    assert torch.equal(held_out.text(0), texts.text(int(places[0])))


def folders_that_writers_filled_side_by_side_are_read_as_one(folder: Path, tmp_path: Path) -> None:
    one, header = Texts.load(folder), TextsHeader.read(folder)
    for name, seed in (("a", 0), ("b", 1)):
        shutil.copytree(folder, tmp_path / name)
        dataclasses.replace(header, settings=header.settings | {"seed": seed}).write(tmp_path / name)
    both = Texts.load(tmp_path)
    assert len(both) == 2 * len(one) and torch.equal(both.text(len(one)), one.text(0))
    assert torch.equal(both.conversations.unique(), torch.arange(2 * (int(one.conversations.max()) + 1)))
    same, other = header.settings, header.settings | {"temperatures": [0.5], "seed": 1}
    for settings, sources, said in ((same, {}, "prompts of one seed"), (other, {}, "temperatures")):
        dataclasses.replace(header, settings=settings, sources=sources).write(tmp_path / "b")
        with pytest.raises(UserError, match=said):
            Texts.load(tmp_path)
    for name, seed in (("a", 0), ("b", 1)):
        settings = header.settings | {"seed": seed}
        dataclasses.replace(header, settings=settings, sources={"asked.jsonl": "1"}).write(tmp_path / name)
    with pytest.raises(UserError, match=r"prompts of asked\.jsonl.*give every writer prompts of its own"):
        Texts.load(tmp_path)


@pytest.mark.parametrize(
    ("sources", "seed", "said"),
    [
        ({"copy.jsonl": "1"}, 1, "give every writer prompts"),
        ({"reasoning_gym:chain_sum:9": ""}, 0, "give every writer a seed"),
        ({"reasoning_gym:chain_sum:9": ""}, 1, None),
        ({"reasoning_gym:dice:9": ""}, 0, None),
        ({}, 0, None),
    ],
)
def test_writers_side_by_side_have_no_prompts_in_common(sources: dict[str, str], seed: int, said: str | None) -> None:
    by = WrittenBy("pocket", "0", "0", "0", 9)
    first = TextsHeader(by, {"seed": 0}, {"asked.jsonl": "1", "reasoning_gym:chain_sum:5": ""})
    with nullcontext() if said is None else refused(said):
        first.refuse_beside(TextsHeader(by, {"seed": seed}, sources), Path("b"))


def rows_hold_whole_texts_and_only_what_was_written_counts(folder: Path) -> None:
    texts = Texts.load(folder)
    packed = texts.packed(row_length=512, seed=0)
    assert int(packed.is_supervised.sum()) == texts.num_written_tokens and packed.num_cut == 0
    found = set()
    for row, segments, positions in zip(packed.tokens, packed.segments, packed.positions, strict=True):
        for segment in range(1, int(segments.max()) + 1):
            at = segments == segment
            assert positions[at].tolist() == list(range(int(at.sum())))
            found.add(tuple(row[at].tolist()))
    assert found == {tuple(texts.text(index).tolist()) for index in range(len(texts))}
    written = texts.tokens[texts.supervised()]
    assert torch.equal(texts.count_written_tokens(320), torch.bincount(written.long(), minlength=320))


def what_counts_is_shown_and_a_mask_of_everything_refused(
    target: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(target, folder, "--show-data=2") == 0
    shown, texts = capsys.readouterr().out, Texts.load(folder)
    answer = TargetTokenizer(target).decode(texts.text(1)[texts.prompt_lengths[1] :].tolist())
    assert shown.count("[[") == 2 and f"<|im_start|>assistant\n[[{visible(answer, keep=chr(10))}]]" in shown
    everything = dataclasses.replace(texts, prompt_lengths=torch.zeros_like(texts.prompt_lengths))
    with pytest.raises(UserError, match="prompts too"):
        show_texts(everything, TargetTokenizer(target), 1, in_colour=False)


def test_a_plan_says_what_the_texts_take_and_refuses_a_full_disk(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert write(target, tmp_path / "out", "--plan=100", "device=cpu") == 0
    said = capsys.readouterr().out
    assert "2,472" in said and "25" in said  # tokens of 12 texts of 200 + 6, all of which the target writes, at 100/s
    assert not (tmp_path / "out").exists()
    assert write(target, tmp_path / "out", "--plan=100", "device=cpu", "dtype=float32") == 0
    assert capsys.readouterr().out == said, "on a CPU weights and cache are float32"
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    assert write(target, tmp_path / "out", "--plan=100") == 2
    assert write(target, tmp_path / "out") == 2
    assert "num_texts" in capsys.readouterr().err


def test_a_plan_counts_the_prompts_that_there_are(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(*lines: str) -> int:
        (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
        return write(target, tmp_path / "out", f"prompts=[{tmp_path / 'prompts.jsonl'}]", "--plan=100")

    assert planned('{"prompt": "one"}', '{"prompt": "One!"}', "{", '{"messages": [], "prompt": "two"}') == 0
    assert f" {2 * (200 + 6):,} " in capsys.readouterr().out
    for lines in (["{"], [""], ['{"turns": ["one"]}']):
        assert planned(*lines) == 2
        assert "refused: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_plan_at_no_tokens_a_second_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["target=pocket", f"output_dir={tmp_path}", "--plan=0"]) == 2
    assert "--plan=0 is not an option" in capsys.readouterr().err


@pytest.mark.parametrize("template", [None, "{% for message in messages %}{{ message['content'] }}{% endfor %}"])
def test_a_template_without_a_users_turn_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str | None
) -> None:
    model = make_tiny_target(tmp_path, "llama", vocab_size=320, num_hidden_layers=1, tie_word_embeddings=False)
    keys = {"tokenizer.chat_template": template}
    assert write(write_gguf(tmp_path / "a.gguf", model, pre="smollm", keys=keys), tmp_path / "out") == 2
    assert "no chat template with a user's turn" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_tasks_of_a_package_that_is_not_here_are_refused_with_its_name(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert write(target, tmp_path / "out", "prompts=[reasoning_gym:gsm_symbolic:3]") == 2
    assert "pip install" in capsys.readouterr().err


def test_a_text_longer_than_a_row_is_cut_and_counted() -> None:
    tokens = torch.arange(30, dtype=torch.int32)
    packed = pack(tokens, torch.tensor([0, 12, 18, 30]), torch.tensor([2, 1, 10]), row_length=8, seed=0)
    assert packed.num_cut == 2  # the third has no answer within a row, and is left out
    assert np.unique(packed.segments.numpy()).tolist() == [0, 1]
    assert int(packed.is_supervised.sum()) == 6 + 5


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("temperatures=0.5", "list like [1,2]"),
        ("num_texts=abc", "a whole number"),
        ("batch_size=2,3", "several values"),
        ("num_textss=3", "did you mean num_texts?"),
        ("num_samples=3", "did you mean num_texts?"),
        ("drafter=ngram", "drafter is not read"),
        ("workload.limit=3", "workload is not read"),
        ("debug=smoke", "debug is not read"),
        ("target.weights=random", "target.weights=random"),
        ("prompts=[reasoning_gym:]", "TASK:COUNT"),
        ("prompts=[reasoning_gym:chain_sum:0]", "TASK:COUNT"),
        ("prompts=[reasoning_gym:chain_sum:3:4]", "TASK:COUNT"),
        ("prompts=[nobody.jsonl]", "no file nobody.jsonl"),
        ("temperatures=[0,1e-9]", "temperatures: 1e-09 is below 1e-06; use temperatures=[0]"),
        ("prompt_temperatures=[1e-7]", "use prompt_temperatures=[1]"),
        ("top_p=1e-9", "top_p=1e-09 is below 1e-06"),
        ("output_dir=a\nb", "is not a printable path"),
        ("output_dir=~/texts", "write the path in full"),
        ("max_new_tokens=9999", "use max_new_tokens=1536"),
        ("max_prompt_tokens=9999", "use max_prompt_tokens=1792"),
        ("temp=3", "no key temp; see --help"),
        ("limit=3", "no key limit; see --help"),
        ("temperature=0.5", "did you mean temperatures?"),
        ("--show-data=3", "each does something different"),
    ],
)
def test_words_that_no_texts_are_written_by_are_refused_by_name(
    word: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["target=pocket", f"output_dir={tmp_path / 'out'}", word, "--plan=100"]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("word", "said"),
    [("top_p=0.5", "top_p=0.5 changes nothing"), ("prompt_temperatures=[0.5]", "prompt_temperatures is not read")],
)
def test_sampling_of_turns_that_the_target_does_not_write_is_refused(word: str, said: str) -> None:
    own = ["temperatures=[0]", "output_dir=o"]
    parse([*own, word])
    with refused(said, "leave it out"):
        parse([*own, word, "prompts=[p.jsonl]"])


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("prompt\nhello", "`messages`, `conversations` or `prompt`\n"),
        (json.dumps({"prompt": "x " * 999}), "raise max_prompt_tokens"),
    ],
)
def test_longer_prompts_are_advised_where_some_were_too_long(
    line: str, remedy: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text(line)
    assert write(target, tmp_path / "out", f"prompts=[{tmp_path / 'p.jsonl'}]") == 2
    assert remedy in capsys.readouterr().err


def test_refused_texts_leave_a_folder_as_it_was(target: Path, tmp_path: Path) -> None:
    for name, rows in (("none", ""), ("some", '{"prompt": "How much?"}\n{"prompt": "How many are there?"}\n')):
        (tmp_path / f"{name}.jsonl").write_text(rows)
    for out in (tmp_path / "a" / "b", tmp_path):  # one that is not there, and one with other files
        before = sorted(tmp_path.rglob("*"))
        assert write(target, out, f"prompts=[{tmp_path / 'none.jsonl'}]") == 2
        assert sorted(tmp_path.rglob("*")) == before
    assert write(target, tmp_path / "a" / "b", f"prompts=[{tmp_path / 'some.jsonl'}]", "second_turns=0") == 0
    learnt, held_out = Texts.load(tmp_path / "a" / "b").split(0.01)
    assert (len(learnt), len(held_out)) == (1, 1), "of two conversations one is held out, however small the share"


@pytest.mark.parametrize("name", ["prompts-00000.jsonl", "followups-00001.jsonl", "answers-a00000.safetensors"])
def test_files_of_others_are_not_written_over(
    name: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("mine")
    assert write(target, tmp_path) == 2
    assert f"has {name}, but no header.json; name another folder" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ".lock"] == [name]
    assert (tmp_path / name).read_text() == "mine"
