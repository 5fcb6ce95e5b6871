"""What the notebooks call: the runs they find, the numbers they draw, the sentences that are computed from them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from nbformat.v4 import new_code_cell, new_notebook

from spec_lab.core.errors import UserError
from spec_lab.gallery import acceptance, acceptance_plot, graph_modes, kernel_times, pruning, relaxed, roofline, studies
from spec_lab.gallery.__main__ import main
from spec_lab.gallery.export import Shown, write_gallery
from spec_lab.gallery.timeline import RoundTimeline, Stretch, quietest_round, rounds_of
from spec_lab.gallery.timeline_plot import rounds_as_timelines
from spec_lab.record.runs import Run, find_runs
from spec_lab.record.trace import STAGE_PREFIX, TRACE_FILE, TraceEvent, read_trace_file
from tests.fake_runs import MAIN, UNPRUNED, FakeEngine, make_info, make_summary, measure, record_run
from tests.test_study import DELTA, STRICT, FakeRun

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "kernels" / "bench" / "recorded"


def span(name: str, start: float, end: float) -> TraceEvent:
    return TraceEvent(STAGE_PREFIX + name, start, end, is_span=True)


def operator(start: float, end: float) -> TraceEvent:
    return TraceEvent("aten::mul", start, end)


def test_on_a_cpu_operators_are_launches_but_not_inside_a_replay() -> None:
    [first] = rounds_of(
        [
            span("round", 100, 180), span("replay verify", 105, 140), span("accept", 145, 160),
            operator(110, 120), operator(112, 115), operator(130, 138), operator(150, 155),
            span("round", 200, 250), operator(210, 240),
        ]
    )  # fmt: skip
    assert not first.on_gpu
    assert first.length_us == 100
    assert first.stages == [Stretch("replay verify", 5, 40), Stretch("accept", 45, 60)]
    assert first.launches == [Stretch("replay verify", 5, 40), Stretch("aten::mul", 50, 55)]
    assert first.work == [(10, 20), (30, 38), (50, 55)]
    assert first.gaps == [(0, 10), (20, 30), (38, 50), (55, 100)]
    assert first.idle_share == pytest.approx(0.77)
    assert first.longest_gap_us == 45


def test_on_a_gpu_calls_that_submit_are_launches_and_kernels_are_work() -> None:
    """A kernel that runs into the next round is cut at its start; operators of the host are neither."""
    rounds = rounds_of(
        [
            span("round", 0, 90), TraceEvent("stage:verify", 5, 60, on_device=True, is_span=True),
            operator(1, 9), TraceEvent("cudaLaunchKernel", 2, 4), TraceEvent("cuLaunchKernelEx", 3, 4),
            TraceEvent("cudaGraphLaunch", 10, 12), TraceEvent("cudaStreamSynchronize", 20, 80),
            TraceEvent("gemm", 10, 50, on_device=True), TraceEvent("add", 90, 130, on_device=True),
            span("round", 100, 190), span("round", 200, 210),
        ]
    )  # fmt: skip
    first, second = rounds
    assert [launch.name for launch in first.launches] == ["cudaLaunchKernel", "cudaGraphLaunch"]
    assert (first.on_gpu, first.work, second.work) == (True, [(10, 50), (90, 100)], [(0, 30)])
    assert first.idle_share == pytest.approx(0.5)


def write_trace(folder: Path, trace: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / TRACE_FILE, "wt") as file:
        json.dump(trace, file)


def row(name: str, cat: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "args": {}}


def round_rows(start: float, end: float) -> list[dict[str, Any]]:
    return [row("stage:round", "user_annotation", start, end), row("aten::mul", "cpu_op", start, end)]


def test_the_quietest_round_of_a_trace_file(tmp_path: Path) -> None:
    rows = [*round_rows(0, 90), *round_rows(100, 130), *round_rows(150, 160)]
    others = [{"ph": "M", "name": "process_name"}, row("Iteration", "Trace", 0, 500), {"ph": "i", "ts": 1}]
    write_trace(tmp_path, {"traceEvents": rows + others})
    assert len(read_trace_file(tmp_path)) == 6
    found = quietest_round(tmp_path)
    assert (found.length_us, found.work) == (50, [(0, 30)])


@pytest.mark.parametrize(
    ("trace", "complaint"),
    [
        ([1], "it has no list traceEvents"),
        ({"traceEvents": [row("x", "cpu_op", 0, 1) | {"ts": "0"}]}, r'traceEvents\[0\]\.ts is "0", not a number'),
        ({"traceEvents": round_rows(0, 5)}, "none of its rounds is followed by another one; use profile_rounds=4"),
        ({"traceEvents": round_rows(0, 5)}, r"at least twice graph\.rounds_per_replay"),
    ],
)
def test_a_broken_trace_is_refused_in_a_line(trace: Any, complaint: str, tmp_path: Path) -> None:
    write_trace(tmp_path, trace)
    with pytest.raises(UserError, match=complaint):
        quietest_round(tmp_path)


def test_a_torn_or_missing_trace_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trace\.json\.gz is missing; a run with profile_rounds=4 writes one"):
        quietest_round(tmp_path)
    write_trace(tmp_path, {"traceEvents": round_rows(0, 5) * 50})
    path = tmp_path / TRACE_FILE
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="not a trace of the profiler"):
        quietest_round(tmp_path)


def mode_round(
    mode: str, launches: float, work: Sequence[tuple[float, float]], eager: Sequence[float] = ()
) -> graph_modes.ModeRound:
    """A round of a mode, of which an eager run took turns with it at these slowdowns."""
    summary = make_summary(references={"eager": measure(MAIN, eager)} if eager else {})
    summary["launches_per_round"] = launches
    timeline = RoundTimeline(100.0, [Stretch("replay verify", 0, 60)], [Stretch("x", 1, 2)], list(work), on_gpu=False)
    return graph_modes.ModeRound(mode, summary, timeline)


def test_graph_modes_conclude_with_launches_and_gaps() -> None:
    rounds = [mode_round("eager", 604, [(0, 50)]), mode_round("round", 4, [(0, 90)], (1.01, 1.0, 1.0))]
    said = graph_modes.conclude(rounds)
    assert "604 launches (operators that compute or write); graph mode **round** makes them 4" in said
    assert "Nothing runs for 50% of the eager round and for 10% of this one" in said
    assert "the longest gap is 50% of the one and 10% of the other" in said
    assert "of eager's time, within noise" in said and "from a CPU" in said
    assert "nothing beside eager" in graph_modes.conclude(rounds[:1])
    assert "no eager round" in graph_modes.conclude(rounds[1:])


def test_an_eager_round_is_found_by_its_mode_whatever_else_its_name_says() -> None:
    eager, *others = (mode_round(f"{mode}, seed=0", 604, [(0, 50)]) for mode in ("eager", "round", "full_loop"))
    assert "An eager round is 604 launches" in graph_modes.conclude([eager, *others])
    more = mode_round("eager, seed=1", 604, [(0, 50)])
    assert "There is more than one eager round to compare here" in graph_modes.conclude([eager, more, *others])
    eager.summary["launches_per_round"] = None
    assert "1 launches (operators not called by another one)" in graph_modes.conclude([eager, *others])


def test_a_replay_of_several_rounds_has_the_time_and_the_launches_of_one() -> None:
    each = mode_round("round, 4 a replay", 1, [(0, 50)])
    each.summary["graph"]["rounds_per_replay"] = 4
    each.summary["launches_per_round"] = None
    [row] = graph_modes.times([each]).to_dict("records")
    assert row["profiled round, ms"] == pytest.approx(0.025) and row["launches"] == 0.25


def test_a_mode_is_timed_against_the_eager_run_of_its_own_turns_alone() -> None:
    eager = mode_round("eager", 604, [(0, 50)])
    faster = mode_round("round", 4, [(0, 90)], (2.0, 2.05, 1.98))
    said = graph_modes.conclude([eager, faster])
    assert "0.50 (" in said and "noise" not in said
    row = graph_modes.times([eager, faster]).set_index("mode").loc["round"]
    assert row["low"] < row["over eager"] < row["high"] < 1
    apart = graph_modes.conclude([eager, mode_round("round", 4, [(0, 90)])])
    assert "references=[eager]" in apart and "of eager's time" not in apart


def test_bands_are_as_long_as_rounds_without_the_profiler_in_one_scale() -> None:
    """The profiler, or a busy minute, makes a round three times as long, which is nothing to see."""
    short, long = mode_round("eager", 604, [(0, 50)]), mode_round("round", 4, [(0, 270), (280, 300)])
    stretched = RoundTimeline(300.0, [Stretch("verify", 0, 180)], [], [(0.0, 300.0)], on_gpu=False)
    short.summary["round_ms"], long.summary["round_ms"] = 10.0, 5.0
    [axes] = rounds_as_timelines([short, graph_modes.ModeRound(long.mode, long.summary, stretched)]).axes
    widths = [patch.get_width() for patch in axes.patches if patch.get_height() > 0.5]  # type: ignore[attr-defined]
    assert widths == pytest.approx([6, 3])
    assert axes.get_xlim() == (0, 10)
    [axes] = rounds_as_timelines([short, mode_round("round", 4, [(0, 90)], eager=(1.0, 1.02, 0.99))]).axes
    assert axes.get_xlim()[1] == pytest.approx(1.0, abs=0.05), "eager's is 1, and the other took turns with one"


def test_a_batch_size_that_did_not_run_is_refused(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    with pytest.raises(UserError, match="no run has batch_size=16; there are 1"):
        graph_modes.read_rounds(find_runs([tmp_path]), batch_size=16)


def record_study(folder: Path, started_at: str, **choices: str) -> None:
    info = make_info(started_at=started_at)
    info.choices.update(choices)
    record_run(folder, info=info)


def test_of_several_sweeps_the_newest_is_a_study(tmp_path: Path) -> None:
    record_study(tmp_path / "old" / "a", "2026-01-01T00:00:00+00:00", experiment="pruning")
    record_study(tmp_path / "new" / "a", "2026-01-02T00:00:00+00:00", experiment="pruning")
    record_study(tmp_path / "new" / "b", "2026-01-03T00:00:00+00:00", experiment="pruning")
    record_study(tmp_path / "other" / "a", "2026-01-04T00:00:00+00:00", experiment="drafters")
    runs = studies.load_study(tmp_path, "pruning")
    assert [run.folder.relative_to(tmp_path).as_posix() for run in runs] == ["new/a", "new/b"]
    assert studies.describe(runs) == (
        "2 runs on a test CPU, 2 threads, float32, 12 prompts, torch 2.13.0, revision 0123abc, 2026-01-03"
    )


def test_a_study_that_is_not_there_comes_with_its_command(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "none"):
        with pytest.raises(UserError, match="it has no finished run; make them with python -m"):
            studies.load_study(tmp_path / folder, "pruning")


def test_any_folder_of_runs_and_any_list_of_folders_is_a_study(tmp_path: Path) -> None:
    """Of a folder without the experiment's runs: the newest run and those beside it."""
    for second, place in enumerate(("a/1", "b/1", "b/2")):
        record_study(tmp_path / place, f"2026-01-01T00:00:0{second}+00:00", drafter=place)

    def names(folders: studies.Folders) -> list[str]:
        return [run.folder.relative_to(tmp_path).as_posix() for run in studies.load_study(folders, "pruning")]

    assert names(tmp_path) == ["b/1", "b/2"] and names(tmp_path / "a") == ["a/1"]
    assert names([tmp_path / "b" / "2", str(tmp_path / "a")]) == ["a/1", "b/2"]


def test_no_two_runs_of_a_picture_are_called_alike(tmp_path: Path) -> None:
    for number, (rule, seed) in enumerate((("strict", 0), ("fly", 0), ("strict", 1))):
        info = make_info({"seed": seed}, f"2026-01-01T00:00:0{number}+00:00")
        info.choices.update(drafter="own", acceptance=rule)
        record_run(tmp_path / str(number), info=info)
    runs = find_runs([tmp_path])
    assert studies.told_apart(runs[:1], ["own"]) == ["own"]
    assert studies.told_apart(runs, ["own"] * 3) == ["own, strict, seed=0", "own, fly, seed=0", "own, strict, seed=1"]


def drafted(tmp_path: Path, **names: Sequence[int]) -> list[acceptance.DraftedRun]:
    """Runs at K=3 whose requests all accept the same, by drafter; the odd ones are of another category."""
    runs = []
    for name, accepted in names.items():
        FakeRun(STRICT, 3, accepted, num_requests=6).record(tmp_path / name)
        [run] = find_runs([tmp_path / name])
        run.summary["choices"]["drafter"] = name
        runs.append(run)
    found = acceptance.read_drafted(runs)
    for each in found:
        for number, request in enumerate(each.rows):
            request["category"] = ("code", "prose")[number % 2]
    return found


def test_acceptance_is_told_by_drafter_and_category(tmp_path: Path) -> None:
    found = drafted(tmp_path, good=[3, 3, 1], bad=[1, 0, 0], twin=[3, 3, 1], oracle=[3, 3, 3])
    assert acceptance.usual_draft_tokens(found) == 3
    assert [each.drafter for each in acceptance.at(found, 3)] == ["oracle", "good", "twin", "bad"]
    frame = acceptance.lengths(found).set_index(["drafter", "category"])
    assert frame.loc[("good", "all"), "acceptance_length"] == pytest.approx(10 / 3)
    assert frame.loc[("good", "all"), "low"] == frame.loc[("good", "all"), "high"]
    assert (frame.loc[("bad", "all"), "requests"], frame.loc[("bad", "code"), "requests"]) == (6, 3)
    said = acceptance.conclude(found, 3)
    assert "At K = 3 **good** gets the most accepted: 3.33 (3.33 to 3.33)" in said
    assert "the difference to twin is within noise; it is beyond noise to 1 of the 2 others" in said
    assert "oracle" not in said
    assert "Only rounds on easier text get so far" in said
    assert "the first is accepted in 100.0% of the rounds and number 3 in 66.7%" in said


def test_a_category_of_one_prompt_has_no_interval(tmp_path: Path) -> None:
    [run] = drafted(tmp_path, good=[3, 1])
    alone = acceptance.DraftedRun(run.drafter, 3, run.summary, run.rows[:1])
    frame = acceptance.lengths([alone])
    assert frame["acceptance_length"].notna().all() and frame[["low", "high"]].isna().all(axis=None)
    assert acceptance_plot.by_drafter([alone]).axes
    assert acceptance_plot.by_category([run], 3).axes


def test_a_best_drafter_that_stands_alone(tmp_path: Path) -> None:
    said = acceptance.conclude(drafted(tmp_path, good=[3, 3], bad=[1, 1]), 3)
    assert "more than any other drafter gets, beyond noise" in said
    assert acceptance.conclude(drafted(tmp_path / "x", oracle=[3]), 3).startswith("Nothing was drafted at K = 3")


def test_a_k_that_did_not_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run has K=5; there are 3"):
        acceptance.at(drafted(tmp_path, good=[3]), 5)


def pruned_run(prune: str, engine: FakeEngine, slowdowns: Sequence[float]) -> Run:
    info = make_info()
    info.choices["prune"] = prune
    references = {} if prune == "none" else {"unpruned": measure(UNPRUNED)}
    return Run(Path(), make_summary(info=info, main=measure(engine, slowdowns), references=references))


def test_pruning_is_told_in_rows_and_in_time() -> None:
    same = (1.0, 1.02, 0.99)
    runs = [pruned_run(prune, MAIN, same) for prune in ("catchup", "post_attention")]
    frame = pruning.savings([*runs, pruned_run("none", UNPRUNED, same)])
    assert list(frame["prune"]) == ["none", "post_attention", "catchup"]
    none, _, catchup = frame.to_dict("records")
    assert (none["catchup_rows"], catchup["catchup_rows"], catchup["live_rows"]) == (4, 1, 1)
    assert (none["logit_rows"], catchup["logit_rows"]) == (3, 1)
    assert catchup["round_ratio"] == pytest.approx(3.67 / 3.72)
    assert catchup["prompt_ratio"] == pytest.approx(1) and not catchup["prompt_shorter"]
    assert catchup["round_shorter"] and not none["round_shorter"] and not catchup["round_longer"]
    said = pruning.conclude(frame)
    assert "At K = 3 **catchup** carries 1.0 of 4.0 rows a request round" in said
    assert "Of 2 pruned runs 2 have a shorter round than the unpruned run beside them" in said


def test_a_difference_within_noise_is_none() -> None:
    frame = pruning.savings([pruned_run("catchup", MAIN, (0.8, 1.3, 1.0))])
    assert "Of 1 pruned runs 0 have a shorter round" in pruning.conclude(frame)
    alone = pruning.savings([pruned_run("none", UNPRUNED, (1.0,))])
    said = pruning.conclude(alone)
    assert "nothing is said of rows" in said and "nothing is said of time" in said


def test_relaxed_rules_are_weighed_against_strict(tmp_path: Path) -> None:
    FakeRun(STRICT, 3, [2, 2], wrong=[0]).record(tmp_path / "strict")
    FakeRun(DELTA, 3, [3, 3], wrong=[0, 1, 2], other=range(9)).record(tmp_path / "delta")
    frame = relaxed.trade(relaxed.read_points(find_runs([tmp_path])))
    [point] = frame.to_dict("records")
    assert point["gain"] == pytest.approx(4 / 3)
    assert (point["difference"], point["lost"], point["gained"], point["n"]) == (pytest.approx(-20), 2, 0, 10)
    said = relaxed.conclude(frame)
    assert "**top 10, delta 0.6** at K = 3 brings the most: +33 % acceptance length" in said
    assert "2 answers lost and 0 gained of 10. Of 1 relaxed points none changes the accuracy" in said
    assert f"a loss of up to {-point['low']:.1f} points" in said
    assert "1 answer worse" in relaxed.conclude(frame.assign(high=-1.0))


def test_relaxed_rules_without_strict_are_refused(tmp_path: Path) -> None:
    FakeRun(DELTA, 3, [3]).record(tmp_path / "delta")
    with pytest.raises(UserError, match="no lossy rule has a strict run to compare with"):
        relaxed.read_points(find_runs([tmp_path]))


def test_recorded_kernel_times_are_read_with_where_they_are_from() -> None:
    frame = roofline.load_figures(RECORDED)
    assert len(frame) > 10 and (frame["kernel_us"] > 0).all()
    assert "NVIDIA H200, torch 2.11.0, triton 3.6.0" in roofline.provenance(RECORDED)


HEADER = "kernel,shape,bytes,flops,kernel_us,reference_us\n"


def test_the_floor_is_the_longer_of_bytes_and_products(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        f"# some GPU\n{HEADER}attention,small,4200000,1000,2.0,8.0\n"
        "product,large,4200000,7900000000,20,10\nsort,any,42,,1,1\n"
    )
    frame = roofline.against_roof(roofline.load_figures(tmp_path), roofline.Roof("a GPU", 4.2e12, 790e12))
    assert list(frame["floor_us"].round(5)) == [1.0, 10.0, 0.00001]
    assert list(frame["bound"]) == ["memory", "products", "memory"]
    assert list(frame["of_roof"].round(3)) == [0.5, 0.5, 0.0]
    said = roofline.conclude(frame, roofline.Roof("a GPU", 4.2e12, 790e12))
    assert "1 of 3 measurements are slower than the torch reference" in said
    assert "1 of the 2 shapes that multiply under memory" in said


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("kernel,shape\nx,y\n", "it has no column bytes"),
        (f"{HEADER}x,y,0,0,1,1\n", "bytes and kernel_us must be numbers above 0"),
        (f"{HEADER}x,y,many,0,1,1\n", "bytes and kernel_us must be numbers above 0"),
        ("", "not a table of kernel times"),
    ],
)
def test_a_table_that_is_none_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it has no \*\.csv"):
        roofline.load_figures(tmp_path)
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=complaint):
        roofline.load_figures(tmp_path)


def test_kernels_of_a_run(tmp_path: Path) -> None:
    kernels: Any = [
        {"name": "gemm", "calls_per_round": 40.0, "us_per_round": 900.0},
        {"name": "x" * 90, "calls_per_round": 2.0, "us_per_round": 100.0},
    ]
    record_run(tmp_path / "run", kernels=kernels)
    run = kernel_times.profiled_run(tmp_path)
    said = kernel_times.conclude(run.summary)
    assert "`gemm` takes 90% of 1.0 ms a round; 1 of 2 operators make up 80 %" in said
    record_run(tmp_path / "other", kernels=[])
    with pytest.raises(UserError, match="none of its finished runs has kernel times"):
        kernel_times.profiled_run(tmp_path / "other")


def test_the_page_of_a_gallery(tmp_path: Path) -> None:
    shown = Shown(tmp_path / "notebooks" / "a.ipynb", "A title", "3 runs on a CPU", {"a_plot": b"png"}, "It is so.")
    files = write_gallery(tmp_path / "docs" / "gallery", [shown], "a command", "A note.")
    assert [file.name for file in files] == ["a_plot.png", "README.md"]
    assert files[0].read_bytes() == b"png"
    page = files[1].read_text()
    for part in (
        "`a command`",
        "A note.",
        "## A title",
        "(../../notebooks/a.ipynb)",
        "![a plot](a_plot.png)",
        "It is so.",
    ):
        assert part in page


def test_a_page_keeps_what_it_has_of_other_notebooks(tmp_path: Path) -> None:
    def write(name: str, about: str, note: str) -> str:
        conclusion = f"So is {name}.\n\n## Also\n\nMore of {name}."
        shown = Shown(tmp_path / f"{name}.ipynb", f"Title {name}", about, {name: b"png"}, conclusion)
        return write_gallery(tmp_path / "gallery", [shown], "a command", note)[-1].read_text()

    write("b", "old runs", "A note.\n\nAnd more.")
    first = write("a", "runs", "")
    assert first.index("## Title a") < first.index("## Title b") and "A note.\n\nAnd more." in first
    second = write("b", "new runs", "Another.")
    assert "new runs" in second and "old runs" not in second and "More of a." in second and "A note." not in second
    assert second.count("## ") == 4 and write("b", "new runs", "") == second


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "notebooks: it has no notebook; call this in the repository's folder, or name one"),
        (["none.ipynb"], "none.ipynb: No such file or directory"),
        (["text.ipynb"], "text.ipynb: not a notebook"),
        (["list.ipynb"], "list.ipynb: not a notebook"),
        (["cells.ipynb"], "cells.ipynb: not a notebook"),
        (["untagged.ipynb"], "needs one code cell with the tag parameters"),
        (["twice.ipynb"], "has the name 'x'; name each picture once"),
        (["path.ipynb"], "has the name '../x'; name each picture once"),
    ],
)
def test_what_is_no_notebook_is_refused_in_a_line(
    arguments: list[str], complaint: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / "text.ipynb").write_text("text")
    (empty_folder / "list.ipynb").write_text("[]")
    for file, cells in {"cells": [3], "untagged": ["x"], "twice": ["x", "x"], "path": ["../x"]}.items():
        written = [new_code_cell("1", metadata={"name": name}) if isinstance(name, str) else name for name in cells]
        (empty_folder / f"{file}.ipynb").write_text(json.dumps(new_notebook() | {"cells": written}))
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_every_figure_is_drawn(tmp_path: Path) -> None:
    found = drafted(tmp_path / "drafted", good=[3, 3, 1], bad=[1, 0, 0], oracle=[3, 3, 3])
    FakeRun(STRICT, 3, [2, 2], wrong=[0]).record(tmp_path / "rules" / "strict")
    FakeRun(DELTA, 3, [3, 3], wrong=[0, 1]).record(tmp_path / "rules" / "delta")
    kernels = roofline.against_roof(roofline.load_figures(RECORDED))
    drawn = {
        "one mode": rounds_as_timelines([mode_round("eager", 604, [(0, 50)])]),
        "two modes": rounds_as_timelines([mode_round("eager", 604, [(0, 50)]), mode_round("round", 4, [(0, 90)])]),
        "drafters": acceptance_plot.by_drafter(found),
        "one drafter": acceptance_plot.by_drafter(found[:1]),
        "categories": acceptance_plot.by_category(found, 3),
        "only bounds": acceptance_plot.by_category(found[2:], 3),
        "positions": acceptance_plot.by_position(found, 3),
        "pruning": pruning.rows_and_time(pruning.savings([pruned_run("catchup", MAIN, (1.0, 1.1, 1.0))])),
        "no pruning": pruning.rows_and_time(pruning.savings([pruned_run("none", MAIN, (1.0,))])),
        "trade": relaxed.gain_against_loss(relaxed.trade(relaxed.read_points(find_runs([tmp_path / "rules"])))),
        "bytes": roofline.time_against_bytes(kernels),
        "roofline": roofline.rate_against_intensity(kernels),
        "no products": roofline.rate_against_intensity(kernels[kernels["flops"].isna()]),
        "kernels": kernel_times.longest_kernels(make_summary()),
    }
    for name, figure in drawn.items():
        figure.savefig(tmp_path / "figure.png", dpi=30)
        assert figure.axes and all(axes.get_title(loc="left") or axes.get_xlabel() for axes in figure.axes), name


PICTURES = sorted((ROOT / "docs" / "gallery").glob("*.png"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_pictures_are_small(picture: Path) -> None:
    assert picture.stat().st_size < 150_000
