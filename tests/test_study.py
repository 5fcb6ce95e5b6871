"""Frames, tables, figures and the page, of runs made by hand."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from spec_lab.core.errors import UserError
from spec_lab.record.metric import Measured
from spec_lab.record.names import THIS_RUN
from spec_lab.record.reading import Found, find_runs
from spec_lab.report import main as report
from spec_lab.study import compare, lengths, reliability
from spec_lab.study.figures import svg
from spec_lab.study.frame import labels, load_frame, own, varied
from spec_lab.study.rounds import LOOKS, format_request, load_request, request_html, rounds_of_request
from spec_lab.study.run_table import latency_table, tables_of_run
from spec_lab.study.studies import FIGURES, TABLES, studies_in, study_tables
from spec_lab.study.tables import Table, table_of, written
from tests.fake_runs import CHOICES, MAIN, UNPRUNED, FakeEngine, make_begun, make_run, measure, record_run

SPEC: dict[str, Any] = {
    "question": "What does pruning save?",
    "keys": {"K": "drafter.num_draft_tokens", "prune": "prune"},
    "columns": {"length": "acceptance_length", "MLP rows": "rows.catchup_mlp", "over unpruned": "pruning_speedup.mean"},
    "plot": {"x": "K", "y": "pruning_speedup.mean", "hue": "prune", "even": 1},
}


def recorded(
    folder: Path, name: str, engine: FakeEngine = MAIN, rule: str = "strict", seed: int = 0, **found: Any
) -> Found:
    """Record one run whose configuration says what `engine` did."""
    drafter = {"name": "eagle3", "num_draft_tokens": engine.num_draft_tokens}
    config = {"name": "study", "seed": 0, "batch_size": 1, "drafter": drafter, "study": SPEC}
    config |= {"prune": {"catchup": name}, "acceptance": {"name": rule}}
    begun = make_begun(config, name="study", choices=CHOICES | {"prune": name, "acceptance": rule})
    run = record_run(
        folder / f"{name}-{rule}-{seed}", begun=begun, main=measure(engine, seed=seed, divergences={}), **found
    )
    return Found(folder / f"{name}-{rule}-{seed}", run)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of three runs: unpruned, pruned, and pruned with another K."""
    place = tmp_path_factory.mktemp("study")
    recorded(place, "none", UNPRUNED)
    recorded(place, "catchup", MAIN)
    recorded(place, "catchup", replace(MAIN, num_draft_tokens=1), seed=1)
    return place


def test_the_frame_has_a_row_a_part_and_a_column_a_choice_a_knob_and_a_number(folder: Path) -> None:
    rows = load_frame(folder)
    assert list(rows["part"]) == [THIS_RUN, "plain", "unpruned"] * 3
    run = find_runs(folder)[0].run
    first = rows.iloc[0]
    assert first["rows.verified"] == run["rows.verified"] and first["drafter.num_draft_tokens"] == 3
    assert (first["prune"], first["target.template"], first["K"]) == (run.choices["prune"], "0f1e2d3c4b5a", 3)
    assert list(rows["K"][:3]) == [3, 0, 3] and list(rows["drafter"][:3]) == ["eagle3", "none", "eagle3"]
    assert first["cost.draft"] + first["cost.verify"] + first["cost.rest"] == pytest.approx(
        run["break_even_acceptance_length"]
    )
    assert first["latency_ms.ttft.p99"] == run["latency_ms.ttft.p99"]


def test_runs_are_labelled_by_what_differs(folder: Path) -> None:
    rows = load_frame(folder)
    assert varied(rows) == ["prune", "drafter.num_draft_tokens"]
    assert sorted(labels(own(rows))) == [
        "catchup, K=1",
        "catchup, K=3",
        "none, K=3",
    ]


GOLDEN_STUDY = """\
| K | prune | length | MLP rows | over unpruned |
| ---: | --- | ---: | ---: | ---: |
| 1 | catchup | 1.70 (1.60 to 1.80) | 168 | 0.64 (0.61 to 0.66) |
| 3 | catchup | 2.75 (2.49 to 3.01) | 106 | 1.01 (0.97 to 1.05) |
| 3 | none | 2.75 (2.49 to 3.01) | 424 | 1.00 (0.96 to 1.04) |"""


def test_a_study_has_its_table_in_every_form(folder: Path) -> None:
    [(spec, runs)] = studies_in(find_runs(folder))
    [table] = study_tables(spec, runs)
    assert table.title == SPEC["question"]
    assert table.markdown().split("\n\n")[0] == GOLDEN_STUDY
    assert "weights 91344d74968d" in table.markdown() and "device a test CPU, 2 threads" in table.caption
    text = table.text().splitlines()
    assert text[2].split() == ["K", "prune", "length", "MLP", "rows", "over", "unpruned"]
    csv = pd.read_csv(io.StringIO(table.csv()))
    assert list(csv["MLP rows"]) == [168, 106, 424] and {"length low", "length high", "revision", "weights"} <= set(csv)
    latex = table.latex()
    assert r"\toprule" in latex and "1.70 (1.60 to 1.80)" in latex and r"\caption{What does pruning save" in latex
    assert "<td>catchup</td>" in table.html()


def test_the_latency_table_has_each_part_and_its_change(folder: Path) -> None:
    run = make_run()
    table = latency_table(run)
    names = list(table.shown[""])
    assert names[:3] == ["TTFT mean, ms", "TTFT median, ms", "TTFT P99, ms"]
    assert names[-4:] == ["requests/s", "output tokens/s", "total tokens/s", "requests in flight"] and len(names) == 16
    by_name = table.raw.set_index("number")
    first, last = by_name.loc["output tokens/s", "plain"], by_name.loc["output tokens/s", THIS_RUN]
    assert (first, last) == (
        run.references["plain"]["end_to_end_tokens_per_second"],
        run["end_to_end_tokens_per_second"],
    )
    assert by_name.loc["output tokens/s", f"{THIS_RUN} change"] == pytest.approx(100 * (last / first - 1))
    assert list(table.shown) == ["", "plain", "unpruned", THIS_RUN, "unpruned change", f"{THIS_RUN} change"]


def test_a_run_has_its_tables(folder: Path) -> None:
    run = make_run(acceptance_imposed=True)
    speed, stages, latency, categories = tables_of_run(run)
    assert list(speed.shown[""]) == [THIS_RUN, "plain", "unpruned"] and "*" in speed.shown["acceptance length"][0]
    assert "imposed, not measured" in speed.note and stages.shown["verify"][1] == "2.12"
    assert len(latency.shown) == 16
    assert list(categories.shown["category"]) == ["prose", "dates", "code", "(all)"]


def test_runs_are_compared_prompt_by_prompt(folder: Path) -> None:
    """The same outcomes with another pruning do not differ at all; other seeds do, and one draft less is shorter."""
    runs = find_runs(folder)
    table = compare.comparison_table(runs).raw.set_index("#")
    assert list(table.index) == ["#1 (base)", "#2", "#3"]
    assert (table.loc["#3", "difference"], table.loc["#3", " "]) == (0.0, "within noise")
    assert (
        table.loc["#2", "difference"] < 0
        and table.loc["#2", "difference high"] < 0
        and table.loc["#2", " "] == "shorter"
    )
    assert set(table["paired"][1:]) == {"yes"}
    costs = compare.cost_table(runs).raw
    assert (costs["draft"] + costs["verify"] + costs["rest"]).tolist() == pytest.approx(costs["break-even"].tolist())


def test_lossy_rules_are_priced_beside_the_lossless_run(tmp_path: Path) -> None:
    recorded(tmp_path, "catchup", rule="strict", acceptance_lossless=True)
    recorded(tmp_path, "catchup", replace(MAIN, num_draft_tokens=3), rule="loose", seed=5, acceptance_lossless=False)
    table = compare.rule_table(find_runs(tmp_path)).raw
    assert list(table["rule"]) == ["strict", "loose"] and table["equal outputs"][0] == 1.0
    gained = table["acceptance length"][1] - table["acceptance length"][0]
    assert table["gain"][1] == pytest.approx(gained)
    assert (table["lost"][1], table["gained"][1], table["points to lossless"][1]) == (0, 0, 0.0)
    assert compare.rule_table(find_runs(tmp_path / "catchup-loose-5")).shown.empty, "there is nothing to compare with"


def test_lengths_as_other_tools_count_them() -> None:
    """Rounds of 4, 1 and 3 judged tokens, the last cut after 2; then a round whose second token ends the text."""
    first, second = (request for request in measure(MAIN).requests[:2])
    rounds = {"accepted_per_round": [3, 0, 2], "judged_per_round": [4, 1, 3], "emitted_per_round": [4, 1, 2]}
    ended = {"accepted_per_round": [3], "judged_per_round": [2], "emitted_per_round": [2], "finish_reason": "eos"}
    offers = {"offered_per_round": None, "turn": 1}
    rows = [first.model_copy(update=rounds | offers), second.model_copy(update=ended | offers)]
    assert lengths.vllm(rows) == pytest.approx(1 + 8 / 4)
    assert lengths.deepspec(rows) == pytest.approx((4 + 1 + 3 + 2) / 4)
    assert lengths.aiperf(rows) == pytest.approx(((1 + 5 / 3) + (1 + 3)) / 2)
    assert lengths.specdec_bench(rows) == pytest.approx((8 / 4 + 2 / 2) / 2)


def test_confidences_are_judged_up_to_the_end_of_a_text() -> None:
    request = (
        measure(MAIN)
        .requests[0]
        .model_copy(
            update={
                "accepted_per_round": [1, 2],
                "judged_per_round": [2, 1],
                "confidence_per_round": [[0.9, 0.4], [0.8, 0.7]],
            }
        )
    )
    drafts = reliability.judged_drafts([request])
    assert drafts[["position", "confidence", "accepted"]].values.tolist() == [
        [1, 0.9, True],
        [2, 0.4, False],
        [1, 0.8, True],
    ]
    assert reliability.chance_of_order(drafts) == 1.0
    assert reliability.calibration_error([0.9, 0.4, 0.8], [1, 0, 1]) == pytest.approx((0.1 + 0.4 + 0.2) / 3)
    assert reliability.chance_of_order(drafts[drafts["accepted"]]) is None


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_named_table_can_be_made_of_any_runs(name: str, folder: Path) -> None:
    table = TABLES[name](find_runs(folder), SPEC)
    assert isinstance(table, Table) and isinstance(table.text(), str)
    assert len(table.shown) or name in ("rules", "reliability", "plan")


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_every_named_figure_can_be_drawn_of_any_runs(name: str, folder: Path) -> None:
    runs = find_runs(folder)
    if name == "rules":
        pytest.skip("there is no lossy run among them")
    text = svg(FIGURES[name](runs, SPEC))
    assert text.startswith("<svg") and ("a test CPU" in text or name in ("reliability", "plan"))


def test_columns_that_runs_lack_are_left_out_and_across_spreads_one() -> None:
    rows = pd.DataFrame({"k": [1, 1, 2, 2], "p": list("abab"), "round_ms": [1.0, 2.0, 3.0, 4.0]})
    table = table_of(rows, {"K": "k", "ms": "round_ms", "none": "nothing"}, across="p", shown="round_ms")
    assert table.shown.values.tolist() == [[1, "1.00", "2.00"], [2, "3.00", "4.00"]] or table.shown.shape == (2, 3)


def test_the_prompts_of_an_accuracy_are_counted_and_not_in_percent() -> None:
    assert [written(name, 12) for name in ("accuracy.n", "accuracy_change.lost")] == ["12", "12"]


def test_a_request_is_shown_round_by_round(folder: Path) -> None:
    found = find_runs(folder)[0]
    request = load_request(found.folder, "r1")
    prompt, *rounds = rounds_of_request(request)
    assert prompt.title == "prompt pass" and len(rounds) == len(request.accepted_per_round or ())
    assert sum(len(part.tokens) for part in (prompt, *rounds)) == len(request.output_ids)
    marked, coloured = format_request(request, False), format_request(request, True)
    assert f"{LOOKS['a'].mark}[" in marked and "\x1b[30;42m" in coloured and "\x1b" not in marked
    html = request_html(found.folder, "r1")
    assert html.count("<tr>") == len(rounds) + 1 and "<script" not in html
    with pytest.raises(UserError, match="no request 'r99'; it has 12, such as"):
        load_request(found.folder, "r99")


def test_a_request_whose_engine_tells_no_rounds_is_shown_too(folder: Path) -> None:
    request = load_request(find_runs(folder)[0].folder, "r0")
    silent = request.model_copy(update=dict.fromkeys(("emitted_per_round", "token_origins", "text_ends")))
    [only] = rounds_of_request(silent)
    assert len(only.tokens) == len(request.output_ids) and "unknown" in format_request(silent, False)


def call(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = report([str(each) for each in arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_command_prints_and_writes_everything(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = call(folder, capsys=capsys)
    assert code == 0 and SPEC["question"] in text and "The newest finished run" in text
    files = {"--csv": tmp_path / "a.csv", "--html": tmp_path / "a.html", "--figures": tmp_path / "figures"}
    code, text = call(folder, *(word for pair in files.items() for word in pair), capsys=capsys)
    assert code == 0 and len(pd.read_csv(files["--csv"])) == 9
    assert {"plot.png", "run_stages.png"} <= {path.name for path in files["--figures"].iterdir()}
    page = files["--html"].read_text()
    assert not re.search(r"(src|href)=\"?https?:", page), "it opens without a network"
    assert page.count("<svg") == 5 and "python -m spec_lab" in page and "What does pruning save?" in page
    assert call(folder, "--markdown", capsys=capsys)[1].startswith("| K | prune |")
    assert r"\begin{table}" in call(folder, "--latex", capsys=capsys)[1]
    assert "acceptance_length" in call("--definitions", capsys=capsys)[1]
    assert "tokens a round" in call(folder, "--request", capsys=capsys)[1]
    assert "round 1:" in call(folder, "--request", "r0", capsys=capsys)[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "no run here or below"),
        (["--base", "9"], "the runs are 1 to 3"),
        (["--rescore", "acceptance=strict"], "record.topk"),
    ],
)
def test_the_command_says_what_is_missing(
    arguments: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = call(*([] if arguments == ["nowhere"] else [folder]), *arguments, capsys=capsys)
    assert code == 2 and said in text


def test_a_run_that_failed_stands_in_the_table_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from spec_lab.record.recorder import ended, write_run

    recorded(tmp_path, "catchup")
    write_run(tmp_path / "other", ended(make_begun(), "failed", "out of memory"))
    code, text = call(tmp_path, capsys=capsys)
    assert code == 0 and "failed: out of memory" in text


def test_what_the_runs_lack_costs_nothing() -> None:
    """A run of another engine tells tokens and nothing else."""
    silent = make_begun(engine="another").model_copy(update={"status": "finished"})
    from spec_lab.record.summary import finished_run

    requests = [
        request.model_copy(update=dict.fromkeys(("accepted_per_round", "emitted_per_round", "emitted_at")))
        for request in measure(MAIN).requests
    ]
    run = finished_run(silent, Measured(requests, measure(MAIN).repeats, 3, is_ours=False))
    assert run["output_tokens"] > 0 and run["acceptance_length"] is None
    assert next(table.title for table in tables_of_run(run)) == "Speed" or tables_of_run(run)
    json.loads(run.model_dump_json())


Make = Callable[..., Any]
