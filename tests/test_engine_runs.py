"""Engines that run here: transformers on pocket, llama.cpp on SmolLM2, and llama.cpp's own server on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from spec_lab.__main__ import main
from spec_lab.checkpoints.packaged import PACKAGED, ZOO
from spec_lab.export.gguf_files import write_eagle3, write_target
from spec_lab.record.models import Request
from spec_lab.record.reading import Found, find_runs

K = 3
CHEAP = [
    *("device=cpu", "dtype=float32", "repeats=1", "warmup_requests=0", "profile_rounds=0", "num_threads=1"),
    *("references=[plain]", "workload.limit=3", "max_new_tokens=16"),
]
SMOL = PACKAGED["smollm2_135m"]
has_llamacpp = pytest.mark.skipif(
    SMOL.find() is None or find_spec("xllamacpp") is None, reason=f"pip install xllamacpp; {SMOL.command}"
)
SERVER = """
import sys, xllamacpp as llama
params = llama.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.endpoint_metrics = sys.argv[1], 2048, 2, True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
params.speculative.types = [llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
draft = params.speculative.draft
draft.mparams.path, draft.n_max, draft.cpuparams.n_threads = sys.argv[2], 3, 1
draft.cache_type_k = draft.cache_type_v = llama.ggml_type.GGML_TYPE_F32
server = llama.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


def runs_in(folder: Path, *arguments: str) -> dict[str, Found]:
    """Run a command line in `folder`, and return its runs by engine."""
    assert main(["-m", *CHEAP, *arguments, f"output_dir={folder}"]) == 0
    found = find_runs(folder)
    assert [each.run.status for each in found] == ["finished"] * len(found)
    return {each.run.engine: each for each in found}


def assert_rounds_add_up(requests: list[Request]) -> None:
    for request in requests:
        offered, accepted = request.offered_per_round or [], request.accepted_per_round or []
        assert all(0 <= hits <= drafts <= K for hits, drafts in zip(accepted, offered, strict=True))
        assert 1 + sum(request.emitted_per_round or []) == len(request.output_ids) <= 16
        assert request.judged_per_round is not None and len(request.judged_per_round) == len(offered)


@pytest.mark.parametrize("drafter", ["draft_model", "ngram"])
def test_transformers_drafts_as_it_counts_and_gives_the_labs_tokens(drafter: str, tmp_path: Path) -> None:
    runs = runs_in(tmp_path, f"drafter={drafter}", "engine=lab,transformers")
    run, requests = runs["transformers"].run, runs["transformers"].requests
    assert (run["equal_to_plain"], run["equal_to_lab"]) == (1.0, 1.0)
    assert_rounds_add_up(requests)
    ours = runs["lab"].requests
    assert [request.output_ids for request in requests] == [request.output_ids for request in ours]
    if drafter == "ngram":
        assert runs["lab"].run["common_length"] is None and run["common_length"] > run["acceptance_length"]
    else:
        assert run["common_length"] == pytest.approx(runs["lab"].run["common_length"], rel=0.15)


@has_llamacpp
def test_llamacpp_runs_the_labs_rounds_on_smollm2(tmp_path: Path) -> None:
    """In float32 the rounds agree one by one, but for the drafts that llama.cpp does not offer behind an end token."""
    runs = runs_in(tmp_path, "target=smollm2_135m", "drafter=eagle3", "engine=lab,llamacpp")
    run = runs["llamacpp"].run
    assert (run["equal_to_plain"], run["equal_to_lab"]) == (1.0, 1.0)
    assert_rounds_add_up(runs["llamacpp"].requests)
    for theirs, ours in zip(runs["llamacpp"].requests, runs["lab"].requests, strict=True):
        assert theirs.output_ids == ours.output_ids and theirs.finish_reason == ours.finish_reason
        assert (theirs.accepted_per_round, theirs.emitted_per_round) == (
            ours.accepted_per_round,
            ours.emitted_per_round,
        )
    assert run["common_length"] == pytest.approx(runs["lab"].run["common_length"], rel=0.01)
    assert run["latency_ms.ttft.mean"] > 0 and run["speedup"] is not None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """llama.cpp's own server, with the shipped head."""
    source = SMOL.find()
    assert source is not None
    target, head = tmp_path / "target.gguf", tmp_path / "head.gguf"
    write_target(target, source)
    write_eagle3(head, ZOO / "smollm2_135m-eagle3", source)
    command = [sys.executable, "-c", SERVER, str(target), str(head)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


@has_llamacpp
def test_a_server_is_counted_by_its_page_of_metrics(server: str, tmp_path: Path) -> None:
    overrides = ["target=smollm2_135m", "drafter=eagle3", "batch_size=2", "engine=server", f"engine.url={server}"]
    found = runs_in(tmp_path / "runs", *overrides)["server"]
    run = found.run
    assert run["equal_to_lab"] == 1.0 and run["equal_to_plain"] is None
    assert run["rounds"] is None and 1 < run["common_length"] < K + 1
    assert 1 + sum(run[f"common_rate_by_position.{place}"] for place in (1, 2, 3)) == pytest.approx(
        run["common_length"]
    )
    assert run["told.acceptance_rate"] > 0 and run["latency_ms.ttft.mean"] > 0
    assert found.requests[0].accepted_per_round is None
