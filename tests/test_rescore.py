"""Re-scoring recorded verify rows: exact for the rule that ran, and monotone for the others."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from spec_lab.acceptance.distribution import SamplingParams
from spec_lab.acceptance.lossy import LossyAcceptance, Window
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.phase import ThinkingMarkers
from spec_lab.acceptance.token_laws import OverlapLaw, exact
from spec_lab.core.errors import UserError
from spec_lab.core.results import GenerationResult
from spec_lab.core.types import Request
from spec_lab.drafters.random import RandomDrafter
from spec_lab.engine.engine import Engine
from spec_lab.measure import trajectory
from spec_lab.measure.trajectory import fitting, likeliest, record_verify_rows
from spec_lab.menu.config import AcceptanceConfig
from spec_lab.options.rules.fly import FlyConfig
from spec_lab.options.rules.rejection import RejectionConfig
from spec_lab.options.rules.relaxed_thinking import RelaxedThinkingConfig
from spec_lab.options.rules.strict import StrictAcceptanceConfig
from spec_lab.record import verify_rows
from spec_lab.record.measured import Measured
from spec_lab.record.recorder import Recorder, request_row
from spec_lab.record.sinks import VERIFY_ROWS_FILE, LineFile
from spec_lab.record.summary import build_summary
from spec_lab.record.verify_rows import load_verify_rows, num_bytes_per_round, save_verify_rows
from spec_lab.rescore.__main__ import main
from spec_lab.rescore.judge import rescore
from spec_lab.rescore.rules import read_rules
from spec_lab.wiring.rules import RuleContext, build_deterministic_rule
from tests.fake_runs import make_info
from tests.fake_target import FakeTarget, PaddedGraph, make_fake_engine

VOCAB, SLOTS, CHUNK, RECORDED = 11, 3, 4, 6
CPU = torch.device("cpu")
MARKERS = ThinkingMarkers(begin=3, end=4)
STRICT = StrictAcceptanceConfig()
RULES: dict[str, AcceptanceConfig] = {
    "strict": STRICT,
    "delta": RelaxedThinkingConfig(topk=3, delta=0.1),
    "wide delta": RelaxedThinkingConfig(topk=6, delta=1.0),
    "ratio": RelaxedThinkingConfig(topk=6, form="ratio", ratio=0.7),
    "by round": RelaxedThinkingConfig(topk=3, delta=0.1, phase="round"),
}


class SpreadTarget(FakeTarget):
    """A target whose logits come in coarse steps, so that ties are common and no token is far ahead; markers are common
    too.
    """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        seeds = super().logits(hidden).argmax(dim=-1, keepdim=True)
        steps = (seeds * 31 + torch.arange(VOCAB) * 17 + seeds * torch.arange(VOCAB) * 7) % 5
        steps[:, MARKERS.begin] += 4 * (seeds[:, 0] % 4 == 0)
        steps[:, MARKERS.end] += 4 * (seeds[:, 0] % 4 == 1)
        return steps.float() / 2


def make_requests() -> list[Request]:
    """Make requests of which some begin inside thinking; they are more than there are slots, and longer than a
    chunk.
    """
    prompts = [(5, 3, 6), (5, 6), (3, 4, 5, 6, 7, 8), (3, 5, 6, 7, 8, 9, 10), (7,), (4, 3), (9, 9, 9, 9, 3)]
    return [Request(f"r{i}", "test", prompt, 40, ignore_eos=True) for i, prompt in enumerate(prompts)]


def make_engine(options: AcceptanceConfig, num_draft_tokens: int = 3) -> Engine:
    engine, target = make_fake_engine(
        lambda target: RandomDrafter(num_draft_tokens, VOCAB, SlotSeeds(SLOTS, 0, CPU)),
        num_slots=SLOTS,
        prefill_chunk=CHUNK,
        graph=PaddedGraph(2),
        vocab_size=VOCAB,
    )
    engine.parts.target = SpreadTarget(engine.parts.backend, vocab_size=VOCAB)
    context = RuleContext(SLOTS, MARKERS, target.eos_token_ids, CHUNK, CPU)
    engine.parts.rule = build_deterministic_rule(options, context)
    return engine


def record(folder: Path, engine: Engine) -> GenerationResult:
    """A timed pass, then one that keeps its rows, as the runner does."""
    requests = make_requests()
    result = engine.generate(requests)
    save_verify_rows(folder, record_verify_rows(engine, requests, RECORDED, MARKERS, CHUNK))
    lines = LineFile(folder / "requests.jsonl")
    for request in result.requests:
        lines.write(request_row(request, "", None, None))
    lines.close()
    return result


@dataclass(frozen=True)
class Recordings:
    """Folders with the rows of a rule of RULES and their results, each made once and only read."""

    root: Path
    made: dict[str, tuple[Path, GenerationResult]] = field(default_factory=dict)

    def of(self, name: str) -> tuple[Path, GenerationResult]:
        if name not in self.made:
            folder = self.root / name
            folder.mkdir()
            self.made[name] = folder, record(folder, make_engine(RULES[name]))
        return self.made[name]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    return Recordings(tmp_path_factory.mktemp("recordings"))


@pytest.mark.parametrize("name", RULES)
def test_the_rule_that_ran_is_reproduced_exactly(name: str, recordings: Recordings) -> None:
    folder, result = recordings.of(name)
    accepted = {request.request_id: request.accepted_per_round for request in result.requests}
    assert rescore(folder, RULES[name]) == accepted
    hits = [count for entry in result.rounds for count in entry.relaxed or []]
    assert bool(hits) == (name != "strict")
    assert name == "strict" or sum(hits) > 5
    first_ids = load_verify_rows(folder).first_ids
    assert {MARKERS.begin, MARKERS.end} <= set(first_ids.tolist()), "the prompt pass's token may set the phase"


@pytest.mark.parametrize("entropy", [1.0, 9.0])
def test_what_was_forgiven_is_forgiven_again(entropy: float, tmp_path: Path) -> None:
    """At temperature 0 `fly` draws nothing, so its recorded rows say what it accepted."""
    engine, options = make_engine(STRICT), FlyConfig(window=1, entropy=entropy)
    window = Window(options.window, options.entropy, options.topk)
    seeds = SlotSeeds(SLOTS, 0, CPU)
    engine.parts.rule = LossyAcceptance(OverlapLaw(exact), SamplingParams(0.0), seeds, window)
    result = record(tmp_path, engine)
    accepted = {request.request_id: request.accepted_per_round for request in result.requests}
    assert rescore(tmp_path, options) == accepted
    assert (rescore(tmp_path, STRICT) == accepted) == (entropy == 9.0), "unless the target is sure, some are forgiven"


@pytest.mark.parametrize("name", [name for name in RULES if name != "strict"])
def test_other_rules_on_a_strict_trajectory(name: str, recordings: Recordings) -> None:
    """Where the text is strict's own, a relaxed rule accepts no less in any round; topk=1 is strict."""
    folder, _ = recordings.of("strict")
    strict, relaxed = rescore(folder, STRICT), rescore(folder, RULES[name])
    pairs = [(a, b) for key in strict for a, b in zip(strict[key], relaxed[key], strict=True)]
    assert all(more >= few for few, more in pairs)
    assert any(more > few for few, more in pairs)
    if getattr(RULES[name], "phase", "") == "token":
        assert rescore(folder, RelaxedThinkingConfig(topk=1, delta=1.0)) == strict


def test_strict_on_a_relaxed_trajectory_is_the_leading_argmaxes(recordings: Recordings) -> None:
    folder, _ = recordings.of("wide delta")
    rows = load_verify_rows(folder)
    is_top = rows.draft_ids == rows.top_ids[:, :-1, 0]
    expected = np.cumprod(is_top, axis=1).sum(axis=1)
    assert np.concatenate(list(rescore(folder, STRICT).values())).tolist() == expected.tolist()


def test_recording_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    engine = make_engine(RULES["delta"])
    rule = engine.parts.rule
    first = record(tmp_path, engine)
    assert engine.parts.rule is rule
    again = engine.generate(make_requests())
    assert [r.output_ids for r in again.requests] == [r.output_ids for r in first.requests]


def test_rows_are_what_the_file_says(recordings: Recordings) -> None:
    folder, result = recordings.of("strict")
    rows = load_verify_rows(folder)
    assert rows.origin.request_ids == [f"r{i}" for i in range(7)]
    assert (rows.origin.markers, rows.origin.prefill_chunk) == ((3, 4), CHUNK)
    assert rows.num_rounds.tolist() == [len(r.emitted_per_round) for r in result.requests]
    assert rows.first_ids.tolist() == [r.output_ids[0] for r in result.requests]
    assert rows.accepted.tolist() == [m for r in result.requests for m in r.accepted_per_round]
    assert rows.top_ids.shape == rows.top_probabilities.shape == (rows.num_rounds.sum(), 4, RECORDED)
    size = (folder / "verify_rows.safetensors").stat().st_size
    assert 0 < size - len(rows.accepted) * num_bytes_per_round(3, RECORDED) < 2000


def test_likeliest_ranks_by_logit_and_ties_by_id() -> None:
    ids, probabilities = likeliest(torch.tensor([[1.0, 3.0, 1.0, 3.0, 2.0]]), 4)
    assert ids.tolist() == [[1, 3, 4, 0]]
    assert probabilities[0, 0] == probabilities[0, 1] > probabilities[0, 2] > probabilities[0, 3]


def test_no_drafts_no_rows_beyond_the_first(tmp_path: Path) -> None:
    record(tmp_path, make_engine(STRICT, num_draft_tokens=0))
    assert set(np.concatenate(list(rescore(tmp_path, STRICT).values()))) == {0}


def test_the_file_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole requests are left out at the end, so that what is there can be re-scored."""
    requests = make_requests()
    records = make_engine(STRICT).generate(requests).requests
    room = sum(len(r.emitted_per_round) for r in records[:2]) * num_bytes_per_round(3, RECORDED)
    monkeypatch.setattr(trajectory, "MAX_BYTES", room)
    assert fitting(requests, records, 3, RECORDED) == requests[:2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RelaxedThinkingConfig(topk=7), "run again with record.topk=7"),
        (RejectionConfig(), "acceptance=rejection draws"),
    ],
)
def test_what_cannot_be_rescored_is_refused(options: AcceptanceConfig, message: str, recordings: Recordings) -> None:
    with pytest.raises(ValueError, match=message):
        rescore(recordings.of("strict")[0], options)


def test_a_run_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run with record\.topk=16"):
        rescore(tmp_path, STRICT)


def write_run(folder: Path, options: AcceptanceConfig, num_draft_tokens: int = 3) -> GenerationResult:
    """Record a whole run with verify rows."""
    engine = make_engine(options, num_draft_tokens)
    requests = make_requests()
    result = engine.generate(requests)
    info = make_info({"acceptance": {"name": "strict"}})
    with Recorder(folder, info) as recorder:
        for request in result.requests:
            request.category = "odd" if request.request_id in ("r1", "r3") else "even"
            recorder.request(request_row(request, "", None, None))
        recorder.finish(build_summary(info, Measured([result]), seconds=1.0))
    save_verify_rows(folder, record_verify_rows(engine, requests, RECORDED, MARKERS, CHUNK))
    return result


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    write_run(folder, STRICT)
    return folder


@pytest.fixture
def run_folder(recorded: Path, tmp_path: Path) -> Path:
    """Copy a recorded run, to be broken."""
    return shutil.copytree(recorded, tmp_path / "run")


RELAXED = "acceptance=relaxed_thinking"


def test_command_prints_a_line_a_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = write_run(tmp_path, STRICT)
    rules = ["acceptance=strict", RELAXED, "acceptance.topk=3,6", "acceptance.delta=1.0", RELAXED, "acceptance.topk=1"]
    assert main([str(tmp_path), *rules]) == 0
    header, _, *lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert header.split() == ["rule", "acceptance", "length", "change", "change", "%", "even", "odd"]
    assert [line.partition("  ")[0] for line in lines] == [
        "strict (the run's own)",
        "strict",
        "relaxed_thinking topk=3 delta=1.0",
        "relaxed_thinking topk=6 delta=1.0",
        "relaxed_thinking topk=1",
    ]
    own, strict, top3, _, top1 = (line.split()[-5:] for line in lines)
    counts = {request.request_id: request.accepted_per_round for request in result.requests}
    accepted = 1 + np.mean(np.concatenate(list(counts.values())))
    assert own[0] == strict[0] == top1[0] == f"{accepted:.3f}"
    assert own[4] == f"{1 + np.mean(counts['r1'] + counts['r3']):.3f}"
    assert strict[1:3] == ["+0.000", "+0.0"]
    relaxed = np.concatenate(list(rescore(tmp_path, RelaxedThinkingConfig(topk=3, delta=1.0)).values())).mean() + 1
    assert top3[0] == f"{relaxed:.3f}"
    assert top3[1] == f"{relaxed - accepted:+.3f}"
    assert float(top3[2]) == pytest.approx(100 * (relaxed / accepted - 1), abs=0.1)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([], "the following arguments are required: RULE; python -m spec_lab.rescore --help"),
        (["acceptance=strikt"], "did you mean strict?"),
        (["acceptance=rejection"], "acceptance=rejection draws or needs the parts of a run"),
        (["acceptance=synthetic"], "acceptance=synthetic draws or needs the parts of a run"),
        (["acceptance.topk=3"], "name the rule before its knobs, acceptance=RULE acceptance.topk=3"),
        (["acceptance=strict", "acceptance.topk=3"], "acceptance.topk is not read by the chosen options"),
        ([RELAXED, "acceptance.topk=three"], "acceptance.topk takes a whole number, not 'three'"),
        ([RELAXED, "acceptance.topk=0"], "acceptance.topk=0 "),
        ([RELAXED, "acceptance.topk=7"], "run again with record.topk=7"),
        (
            [RELAXED, "acceptance.topk=3", "acceptance.delta=nan"],
            "acceptance.delta=nan: must be a finite number of 64 bits; use acceptance.delta=0.6\n",
        ),
        ([RELAXED, "acceptance.topk=range(0,0)"], "names no value"),
        ([RELAXED, "acceptance.topk=range(1,1000000000)"], "names more than 200 values; name fewer"),
        ([RELAXED, "acceptance.topk=range(0,100)", "acceptance.delta=range(0,100)"], "more than 200 rules"),
        ([RELAXED, "acceptance.delta=interval(0,1)"], "name the values, separated by commas"),
        (["acceptance=glob(*)"], "name the values, separated by commas"),
        (["drafter=ngram"], "drafter=ngram: name a rule with acceptance=RULE"),
        (["strict"], "strict: name a rule with acceptance=RULE"),
    ],
)
def test_command_refuses_in_a_line(
    rules: list[str], message: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_folder), *rules]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    assert output.err.count("\n") == 1


def test_a_rule_must_fit_the_drafts_of_the_run() -> None:
    window = ["acceptance=fly", "acceptance.window=3"]
    assert read_rules(window, num_draft_tokens=4)[0].name == "fly window=3"
    with pytest.raises(UserError, match=r"use acceptance.window=2 or .*needs a new run"):
        read_rules(window, num_draft_tokens=3)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_the_folder_may_stand_anywhere(place: int, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["extensions=[]", RELAXED, "acceptance.topk=3"]
    assert main([*typed[:place], str(recorded), *typed[place:]]) == 0
    assert "relaxed_thinking topk=3" in capsys.readouterr().out


def test_command_without_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acceptance=strict", RELAXED]) == 2
    assert "no run is named; add the folder of a run" in capsys.readouterr().err


def test_command_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere"), "acceptance=strict"]) == 2
    missing = tmp_path / "nowhere" / "summary.json"
    remedy = "name the folder of a run; a run prints it at its end"
    assert capsys.readouterr().err == f"refused: {missing}: No such file or directory; {remedy}\n"


def test_what_is_printed_fits_a_terminal(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([str(recorded), "acceptance=strict"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and lines[-1].endswith("may differ.")


def store(folder: Path, origin: object = None, **changes: np.ndarray | None) -> None:
    """Store the rows again, with other arrays; None leaves one out."""
    rows = load_verify_rows(folder)
    arrays = {name: getattr(rows, name) for name in verify_rows.ARRAYS} | changes
    metadata = {"origin": json.dumps(asdict(rows.origin) if origin is None else origin)}
    kept = {name: array for name, array in arrays.items() if array is not None}
    save_file(kept, folder / VERIFY_ROWS_FILE, metadata=metadata)


def cut_rows(folder: Path) -> None:
    path = folder / VERIFY_ROWS_FILE
    path.write_bytes(path.read_bytes()[:-100])


def rows_as_a_folder(folder: Path) -> None:
    (folder / VERIFY_ROWS_FILE).unlink()
    (folder / VERIFY_ROWS_FILE).mkdir()


def pickled_rows(folder: Path) -> None:
    (folder / VERIFY_ROWS_FILE).write_bytes(pickle.dumps(Bomb()))


def read_origin(folder: Path) -> dict[str, object]:
    return asdict(load_verify_rows(folder).origin)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("a pickle was loaded",)


BROKEN_ROWS: dict[str, Callable[[Path], object]] = {
    "cut": cut_rows,
    "a pickle": pickled_rows,
    "empty": lambda folder: (folder / VERIFY_ROWS_FILE).write_bytes(b""),
    "another dtype": lambda folder: store(folder, accepted=load_verify_rows(folder).accepted.astype(np.int64)),
    "no array": lambda folder: store(folder, accepted=None),
    "another length": lambda folder: store(folder, last_ids=load_verify_rows(folder).last_ids[1:].copy()),
    "no top": lambda folder: store(folder, top_ids=load_verify_rows(folder).top_ids[:, :, :0].copy()),
    "rounds beyond": lambda folder: store(folder, num_rounds=load_verify_rows(folder).num_rounds + 1),
    "accepted beyond": lambda folder: store(folder, accepted=load_verify_rows(folder).accepted + 3),
    "origin": lambda folder: store(folder, origin=[1]),
    "one marker": lambda folder: store(folder, origin=read_origin(folder) | {"markers": [3]}),
    "no chunk": lambda folder: store(folder, origin=read_origin(folder) | {"prefill_chunk": 0}),
    "twice": lambda folder: store(folder, origin=read_origin(folder) | {"request_ids": ["r0"] * 7}),
    "a folder": rows_as_a_folder,
}


@pytest.mark.parametrize("name", BROKEN_ROWS)
def test_broken_rows_are_named_in_a_line(name: str, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BROKEN_ROWS[name](run_folder)
    with pytest.raises(UserError, match=r"verify_rows\.safetensors"):
        rescore(run_folder, STRICT)
    assert main([str(run_folder), "acceptance=strict"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("requests.jsonl", lambda text: "".join(text.splitlines(keepends=True)[:3])),
        ("requests.jsonl", lambda text: "{}\n" + text),
        ("summary.json", lambda text: text[:-9]),
    ],
)
def test_broken_records_are_named_in_a_line(
    name: str, cut: Callable[[str], str], run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_folder / name
    path.write_text(cut(path.read_text()))
    assert main([str(run_folder), "acceptance=strict"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"refused: {path}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("value", ["[1,", "\0", "'", "{a:", "${", "1,2)"])
def test_a_knob_that_cannot_be_parsed_is_named_in_a_line(
    value: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_folder), "acceptance=relaxed_thinking", f"acceptance.topk={value}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("refused: acceptance.topk=") and "KEY=VALUE" in error
    assert error.count("\n") == 1
