"""Other engines: what is planned and refused, how rounds are counted, and how a run fails."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from spec_lab.app.compose import Composed, compose
from spec_lab.app.run import run as run_in
from spec_lab.config.checks import problems
from spec_lab.config.run import Run
from spec_lab.core.errors import Breakdown
from spec_lab.engines.llamacpp import read_stream
from spec_lab.engines.plan import EnginePlan
from spec_lab.engines.server import counted
from spec_lab.engines.streams import counters, cut
from spec_lab.record.draft_counts import round_totals
from spec_lab.record.models import Request
from spec_lab.record.reading import find_runs, read_requests, read_run
from spec_lab.study.engines import engines_table
from tests.stand_in_engines import TEXTS, asked_of, write_sglang, write_texts, write_vllm
from tests.tiny_runs import make_run_config, write_prompts

K = 3


@pytest.fixture
def config(pair: tuple[Path, Path], tmp_path: Path) -> Run:
    rows = [{"id": f"p{i}", "prompt": "abcdef"[i:] * 3, "category": "c"} for i in range(3)]
    return make_run_config(pair, write_prompts(tmp_path / "prompts.jsonl", rows))


def on(config: Run, engine: str, **knobs: Any) -> Composed:
    """The run on another engine."""
    chosen = compose([f"engine={engine}"]).config.engine
    changed = replace(config, engine=replace(chosen, **{"timeout": 30.0, **knobs}))
    return composed(changed)


def composed(config: Run) -> Composed:
    """The run as the command line would give it."""
    return Composed(config, {"drafter": config.drafter.name, "engine": config.engine.name})


# What is planned


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["engine=llamacpp", "drafter=oracle"], "no drafter=oracle"),
        (["engine=vllm", "prune=catchup"], "prune.catchup=pre_attention is a choice of the lab's own round"),
        (["engine=vllm", "acceptance=relaxed_thinking"], "no rule like acceptance=relaxed_thinking"),
        (["engine=llamacpp", "tree=dynamic"], "no tree=dynamic"),
        (["engine=transformers", "drafter=draft_model", "batch_size=2"], "one request at a time"),
        (["engine=vllm", "workload.request_rate=2"], "all requests at once"),
        (["engine=llamacpp", "workload=random_ids"], "ignore_eos"),
        (["engine=sglang", "graph=full_loop"], "graph=full_loop is a choice"),
        (["engine=server"], "engine.url"),
        (["engine=llamacpp", "drafter=eagle3", "batch_size=2"], "several requests at once"),
    ],
)
def test_what_an_engine_lacks_is_refused_by_name_before_anything_loads(overrides: list[str], words: str) -> None:
    found = list(problems(compose(overrides).config))
    assert any(words in line for line in found), found


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine=sglang", "tree=dynamic"],
        ["engine=vllm", "drafter=ngram"],
        ["engine=llamacpp", "drafter=none", "graph=eager"],
        ["engine=vllm", "sampling=sampled", "acceptance=rejection", "drafter.draft_sampling=distribution"],
    ],
)
def test_what_an_engine_has_is_planned(overrides: list[str]) -> None:
    config = compose(overrides).config
    assert list(problems(config)) == []
    assert isinstance(config.engine.plan(config), EnginePlan)


# How rounds are counted


def of_llamacpp(rounds: list[tuple[int, int]], stop: str = "limit", last: int | None = None) -> Iterator[Any]:
    """llama.cpp's stream: the prompt pass's token, then of each round its tokens, with the drafts so far."""
    offered = accepted = token = 0
    yield {"stop": False, "tokens": [token], "timings": {}}
    for place, (more, hits) in enumerate(rounds):
        offered, accepted = offered + more, accepted + hits
        timings = {"draft_n": offered, "draft_n_accepted": accepted} if offered else {}
        size = hits + 1 if last is None or place < len(rounds) - 1 else last
        for _ in range(size):
            token += 1
            yield {"stop": False, "tokens": [token], "timings": timings}
    yield {"stop": True, "stop_type": stop}


def test_rounds_are_told_apart_in_a_stream_of_tokens() -> None:
    answer = read_stream(of_llamacpp([(3, 0), (3, 3), (0, 0), (0, 0), (2, 1), (3, 2)]), 100, lambda: 0.0)
    assert answer["offered"] == [3, 3, 0, 0, 2, 3] and answer["accepted"] == [0, 3, 0, 0, 1, 2]
    assert answer["emitted"] == [1, 4, 1, 1, 2, 3] and answer["finish_reason"] == "length"
    assert len(answer["emitted_at"]) == 7


def test_an_end_of_sequence_cuts_what_is_judged_and_not_what_is_accepted() -> None:
    answer = read_stream(of_llamacpp([(3, 1), (3, 3)], stop="eos", last=2), 100, lambda: 0.0)
    assert answer["accepted"] == [1, 3] and answer["judged"] == [2, 2] and answer["emitted"] == [2, 2]
    assert answer["finish_reason"] == "eos" and len(answer["output_ids"]) == 5


def test_a_round_counts_as_judged_if_it_begins_before_the_limit() -> None:
    answer = read_stream(of_llamacpp([(3, 1), (3, 3), (3, 2)], stop="eos"), 5, lambda: 0.0)
    assert answer["accepted"] == [1, 3] and answer["judged"] == [2, 4] and answer["emitted"] == [2, 2]
    assert answer["output_ids"] == [0, 1, 2, 3, 4] and answer["finish_reason"] == "length"
    assert cut([(3, 2, 3)], 4, 4) == ([], 4)


def test_all_engines_are_counted_by_one_function_over_rounds_that_offered_a_draft() -> None:
    one_by_one = Request(
        id="a", prompt_ids=[1], output_ids=[1], accepted_per_round=[0, 3, 0], offered_per_round=[3, 3, 0]
    )
    pooled = Request(id="b", prompt_ids=[1], output_ids=[1], rounds_histogram=[(3, 0, 4), (3, 2, 2)])
    totals = round_totals([one_by_one, pooled], K)
    assert (totals.rounds, totals.accepted) == (8, 7)
    assert totals.by_position == (3, 3, 1) and totals.common_length == 1 + 7 / 8


PAGE = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{model="m",engine="0"} 4.0
vllm:spec_decode_num_drafts_total{model="m",engine="1"} 1.0
vllm:spec_decode_num_draft_tokens_total{model="m"} 15.0
vllm:spec_decode_num_accepted_tokens_total{model="m"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model="m",position="0"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model="m",position="1"} 2.0
"""


def test_counters_of_a_server_are_differences_summed_over_its_engines() -> None:
    after = counters(PAGE)
    found = counted({}, after, "vllm", K)["totals"]
    assert found == {"rounds": 5, "accepted": 6, "by_position": [4, 2]}
    with pytest.raises(RuntimeError, match="restarted"):
        counted({**after, ("vllm:spec_decode_num_drafts_total", ""): 9.0}, after, "vllm", K)
    with pytest.raises(RuntimeError, match=r"more than drafter\.num_draft_tokens=2"):
        counted({}, after, "vllm", 2)
    with pytest.raises(RuntimeError, match="no counter llamacpp:spec_decode_num_drafts"):
        counted({}, after, "llamacpp", K)


# Whole runs, with stand-ins for the engines


@pytest.fixture
def texts(config: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lab's own plain decoding of the run's prompts, which the stand-ins repeat."""
    run_in(composed(config), tmp_path / "lab")
    found = {tuple(request.prompt_ids): request.output_ids for request in read_requests(tmp_path / "lab")}
    path = write_texts(tmp_path / "texts.json", found)
    monkeypatch.setenv(TEXTS, str(path))
    return path


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))


def by_rote(requests: list[Request]) -> float:
    """The common length of stand-ins: they accept 0, 1, .. K drafts in turn."""
    accepted = []
    for request in requests:
        given, mine = 1, []
        while given < len(request.output_ids):
            mine.append(len(mine) % (K + 1))
            given += mine[-1] + 1
        accepted += mine
    return 1 + sum(accepted) / len(accepted)


@pytest.mark.parametrize("by_request", [True, False])
def test_vllm_is_counted_by_request_or_by_its_counters(
    by_request: bool, config: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(write_vllm(tmp_path / "site", by_request), monkeypatch)
    run = run_in(on(config, "vllm"), tmp_path / "vllm")
    requests = read_requests(tmp_path / "vllm")
    assert run.status == "finished" and (run.engine, run.engine_version) == ("vllm", "9.9")
    assert run["common_length"] == pytest.approx(by_rote(requests))
    assert run["told.mean_acceptance_length"] == pytest.approx(by_rote(requests))
    assert (run["equal_to_plain"], run["equal_to_lab"]) == (1.0, 1.0)
    assert run["rows.verified"] is None and run["round_ms"] is None and run["wasted_rounds"] is None
    assert run["latency_ms.tpot.mean"] is not None and run["latency_ms.itl.mean"] is None
    assert (requests[0].accepted_per_round is not None) is by_request
    assert (run["rounds"] is not None) is by_request
    speculative, plain = asked_of(texts)
    assert speculative["speculative_config"]["method"] == "eagle3"  # type: ignore[index]
    assert speculative["max_num_seqs"] == 1 and speculative["enforce_eager"] is True
    assert plain["speculative_config"] is None
    table = engines_table(find_runs([tmp_path / "lab", tmp_path / "vllm"])).shown
    assert list(table["engine"]) == ["lab", "vllm"] and "common length" in table
    assert ("(" in table["to the lab's"].iloc[1]) is by_request


@pytest.mark.parametrize(
    ("accepted", "histogram"),
    [
        ("spec_num_correct_drafts", "spec_correct_drafts_histogram"),
        ("spec_accepted_drafts", "spec_accept_histogram"),
        ("spec_accept_token_num", "spec_nothing"),
    ],
)
def test_sglang_is_counted_under_the_names_of_its_version(
    accepted: str, histogram: str, config: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(write_sglang(tmp_path / "site", accepted, histogram), monkeypatch)
    run = run_in(on(config, "sglang"), tmp_path / "sglang")
    requests = read_requests(tmp_path / "sglang")
    assert run["common_length"] == pytest.approx(by_rote(requests))
    assert run["told.spec_accept_length"] > 1 and run["equal_to_lab"] == 1.0
    assert (requests[0].rounds_histogram is None) is (histogram == "spec_nothing")
    assert run["latency_ms.ttft.mean"] is None and run["end_to_end_tokens_per_second"] > 0
    assert asked_of(texts)[0]["speculative_num_draft_tokens"] == K + 1


def test_tokens_that_part_from_the_labs_are_found_with_the_labs_margin(
    config: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = json.loads(texts.read_text())
    name = next(iter(told))
    told[name][2] = (told[name][2] + 1) % 100
    texts.write_text(json.dumps(told))
    installed(write_sglang(tmp_path / "site", "spec_num_correct_drafts", "none"), monkeypatch)
    run = run_in(on(config, "sglang"), tmp_path / "sglang")
    assert run["equal_to_plain"] == 1.0 and run["equal_to_lab"] == pytest.approx(2 / 3)
    (parted,) = [r.lab_divergence for r in read_requests(tmp_path / "sglang") if r.lab_divergence is not None]
    assert parted.index == 2 and parted.kind == "bug" and parted.margin is not None


# How a run fails


def test_a_version_whose_counters_are_unknown_fails_and_keeps_what_it_decoded(
    config: Run, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(write_vllm(tmp_path / "site", names=("drafts", "draft_tokens", "accepted")), monkeypatch)
    alone = on(replace(config, references=[]), "vllm")
    with pytest.raises(Breakdown, match="no counter vllm:spec_decode_num_drafts"):
        run_in(alone, tmp_path / "vllm")
    run = read_run(tmp_path / "vllm")
    assert run.status == "failed" and "no counter" in (run.reason or "")
    assert len(read_requests(tmp_path / "vllm")) == 3


@contextmanager
def small_server(answers: int, pages: list[str]) -> Iterator[str]:
    """Serve completions of two tokens; after `answers` of them a stream breaks off. `/metrics` gives each of `pages`
    in turn, the last one for ever."""
    left, page = [answers], iter([*pages[:-1], *pages[-1:] * 99])

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            body = {"/v1/models": '{"data": [{"id": "m"}]}', "/version": '{"version": "1"}'}.get(self.path)
            self._send((body or next(page)).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            left[0] -= 1
            done: list[Mapping[str, Any]] = [
                {"choices": [{"text": "a", "token_ids": [3], "finish_reason": None}]},
                {"choices": [{"text": "b", "token_ids": [4], "finish_reason": "length"}]},
            ]
            self._send("".join(f"data: {json.dumps(e)}\n\n" for e in done[: 2 if left[0] >= 0 else 1]).encode())

        def _send(self, body: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_that_dies_fails_the_run_and_keeps_its_answers(config: Run, tmp_path: Path) -> None:
    zero = PAGE.replace("4.0", "0").replace("1.0", "0").replace("15.0", "0").replace("6.0", "0").replace("2.0", "0")
    with small_server(2, [zero]) as url, pytest.raises(Breakdown, match="ended a stream without a reason"):
        run_in(on(config, "server", url=url), tmp_path / "run")
    assert read_run(tmp_path / "run").status == "failed"
    assert [request.output_ids for request in read_requests(tmp_path / "run")] == [[3, 4], [3, 4]]


def test_a_server_tells_totals(config: Run, tmp_path: Path) -> None:
    with small_server(9, [PAGE, PAGE, PAGE.replace("4.0", "14.0").replace("15.0", "45.0")]) as url:
        run = run_in(on(config, "server", url=url, target=None), tmp_path / "run")
    assert run.engine_version == "vllm 1" and run["rounds"] is None
    assert run["common_length"] == 1.0 and run["told.acceptance_rate"] == 0.0
    assert run["equal_to_plain"] is None and run["equal_to_lab"] == 0.0


def test_a_target_that_the_lab_cannot_hold_is_measured_without_it(config: Run, tmp_path: Path) -> None:
    folder = Path(config.target.path or "")
    light = tmp_path / "light"
    light.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".json":
            (light / file.name).write_bytes(file.read_bytes())
    asked = replace(config, target=replace(config.target, path=str(light)), record=replace(config.record, audit=False))
    with small_server(9, [PAGE]) as url:
        run = run_in(on(asked, "server", url=url, counters=False), tmp_path / "run")
    assert run.status == "finished" and run["equal_to_lab"] is None and run["common_length"] is None
    assert "a common length of - of" in run.verdict and run.target.digest is None
