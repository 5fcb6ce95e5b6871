"""`spec_lab.compose` and `spec_lab.run`: the lab inside another program."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import spec_lab
from spec_kernels.native import build
from spec_kernels.native.compiled import use_threads
from spec_kernels.native.compiler import BuildError
from spec_lab.core.errors import UserError
from spec_lab.menu.config import DrafterConfig, RunConfig
from spec_lab.program.compose import retyped
from spec_lab.record import progress
from spec_lab.record.progress import Progress
from tests import recorded_runner

PAGE = Path(__file__).parents[1] / "docs" / "use.md"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, empty_folder: Path) -> ModuleType:
    """A runner that decodes nothing, in place of the real one."""
    module = recorded_runner.stand_in()
    monkeypatch.setitem(sys.modules, "spec_lab.measure.runner", module)
    return module


def records(folder: str = "outputs") -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(Path(folder).rglob("summary.json"))]


def test_composed_is_typed_and_says_what_its_parts_are_called() -> None:
    composed = spec_lab.compose(["drafter=ngram", "prune=catchup", "drafter.num_draft_tokens=5"])
    assert composed.config.drafter.num_draft_tokens == 5
    assert (composed.choices["drafter"], composed.choices["prune"]) == ("ngram", "catchup")
    assert "nothing is refused" in str(composed)
    assert composed._repr_html_().startswith("<pre>target")


def test_names_follow_what_is_changed_after_composing() -> None:
    composed = spec_lab.compose(["prune=catchup"])
    composed.config.prune.catchup = "none"
    composed.config.prune.prefill = "all_rows"
    assert composed.choices["prune"] == "none"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["batchsize=3"], "batch_size"),
        (["--config-dir=x"], "a flag is read on the command line only; write KEY=VALUE"),
        (["-m"], "a flag is read on the command line only"),
        (["drafter=eagle"], "did you mean"),
        (["batch_size=1,2"], "several values, but this is one run; give one of them"),
        (["experiment=graph_modes"], "experiment=graph_modes is several runs"),
        (["hydra.mode=MULTIRUN"], "hydra.mode=MULTIRUN is several runs"),
        (["drafter.max_ngram=3"], "not read by the chosen options"),
    ],
)
def test_what_cannot_be_composed_is_a_user_error(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        spec_lab.compose(overrides)


@pytest.mark.parametrize(
    "overrides", [5, [5], None, "drafter=ngram", b"x", {"seed": 1}, [None], [["seed=1"]], iter([])]
)
def test_what_is_no_list_of_texts_is_a_user_error(overrides: Any) -> None:
    with pytest.raises(UserError, match=r"compose takes a list of texts, not .*; use one such as"):
        spec_lab.compose(overrides)


@pytest.mark.parametrize("override", ["hydra.run.dir=x", "+hydra.callbacks.a._target_=os.mkdir", "name=a\0b"])
def test_what_the_command_line_refuses_is_refused(override: str) -> None:
    with pytest.raises(UserError):
        spec_lab.compose([override])


@pytest.mark.parametrize("composed", ["x", None, 5, RunConfig, ["drafter=ngram"]])
@pytest.mark.parametrize("call", [spec_lab.run, spec_lab.examine])
def test_what_was_not_composed_is_a_user_error(call: Callable[[Any], object], composed: Any) -> None:
    with pytest.raises(UserError, match=r"takes a composed run, not .*; use spec_lab\.\w+\(spec_lab\.compose"):
        call(composed)


WRONG_TYPES: list[tuple[str, Any, str]] = [
    ("drafter.name", "ngram", "drafter.name='ngram' is an option that has its own keys"),
    ("batch_size", "abc", "batch_size takes a whole number"),
    ("batch_size", True, "batch_size takes a whole number"),
    ("kernels", "cuda", "kernels takes auto, torch, triton, native"),
    ("references", ["plane"], "references takes plain, unpruned, eager"),
    ("leave_out", 5, "leave_out takes a list"),
    ("drafter", None, r"drafter takes the composed option; use spec_lab\.compose\(\['drafter=...'\]\)"),
    ("drafter", DrafterConfig, "drafter.name: "),
    ("sampling", {"temperature": 1}, "sampling takes the composed option"),
    ("sampling.temperature", "hot", "sampling.temperature takes a number"),
    ("drafter.k_schedule", [[True]], "drafter.k_schedule takes a list of lists"),
    ("batchsize", 3, "there is no key batchsize; did you mean batch_size?"),
    ("drafter.max_ngram", 3, "drafter.max_ngram is not read by the chosen options"),
    ("name", "${nowhere}", "name takes a text"),
]


@pytest.mark.parametrize(("key", "value", "words"), WRONG_TYPES)
def test_what_is_changed_to_another_type_is_a_user_error(key: str, value: Any, words: str) -> None:
    composed = spec_lab.compose()
    group, _, name = key.rpartition(".")
    setattr(getattr(composed.config, group) if group else composed.config, name, value)
    for call in (spec_lab.run, spec_lab.examine):
        with pytest.raises(UserError, match=words):
            call(composed)
    assert re.match(rf"refused: config\.{words}|refused: .*{words}", str(composed))
    assert composed._repr_html_().startswith("<pre>refused: ")


def test_a_dotted_attribute_is_told_how_to_set_its_key() -> None:
    composed = spec_lab.compose()
    setattr(composed.config, "drafter.num_draft_tokens", 5)
    with pytest.raises(UserError, match=r"write composed\.config\.drafter\.num_draft_tokens = VALUE"):
        spec_lab.run(composed)


def test_single_numbers_of_numpy_and_torch_are_numbers() -> None:
    composed = spec_lab.compose()
    composed.config.batch_size, composed.config.drafter.num_draft_tokens = np.int64(2), torch.tensor(4)
    composed.config.sampling.temperature = np.float32(0.5)
    typed = retyped(composed.config)
    assert (typed.batch_size, typed.drafter.num_draft_tokens, typed.sampling.temperature) == (2, 4, 0.5)


def test_what_is_set_beside_the_config_is_a_user_error() -> None:
    composed = spec_lab.compose()
    for name in ("batch_size", "drafter", "kay", "config", "options"):
        with pytest.raises(UserError, match=rf"{name} cannot be set here; .* composed\.config\.batch_size = 4"):
            setattr(composed, name, None)
    assert composed.config is not None


def test_what_is_changed_to_its_type_in_words_is_taken(runner: ModuleType) -> None:
    composed = spec_lab.compose(["drafter=ngram"])
    composed.config.batch_size, composed.config.output_dir = "2", Path("there")  # type: ignore[assignment]
    result = spec_lab.run(composed)
    assert (result.summary["config"]["batch_size"], result.folder.parent.name) == (2, "there")


def test_hydra_is_left_as_it_was(tmp_path: Path) -> None:
    import hydra

    spec_lab.compose()
    assert not GlobalHydra.instance().is_initialized()
    (tmp_path / "own.yaml").write_text("mine: 3\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        spec_lab.compose(["drafter=ngram"])
        with pytest.raises(UserError):
            spec_lab.compose(["cache.page_size=${nowhere}"])
        assert OmegaConf.to_container(hydra.compose("own")) == {"mine": 3}
    assert not GlobalHydra.instance().is_initialized()


def test_threads_compose_what_each_asked_for() -> None:
    with ThreadPoolExecutor(3) as pool:
        composed = list(pool.map(lambda seed: spec_lab.compose([f"seed={seed}", "drafter=ngram"]), range(3)))
    assert [each.config.seed for each in composed] == [0, 1, 2]


def test_several_runs_in_one_process_each_leave_a_folder_and_print_nothing(
    runner: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [spec_lab.run(spec_lab.compose(["drafter=ngram", f"seed={seed}"])) for seed in (1, 2, 2)]
    assert len({result.folder for result in results}) == 3
    assert [record["status"] for record in records()] == ["finished"] * 3
    assert [result.summary["config"]["seed"] for result in results] == [1, 2, 2]
    assert {len(result.requests) for result in results} == {results[0].summary["num_requests"]}
    assert results[1].requests[0]["output_ids"] == results[2].requests[0]["output_ids"]
    assert capsys.readouterr().out == ""


def test_result_shows_itself_as_text_and_as_html(runner: ModuleType) -> None:
    result = spec_lab.run(spec_lab.compose(["drafter=ngram"]))
    assert "acceptance length" in str(result)
    page = result._repr_html_()
    assert page.count("<tr>") == 4, "a header, the run, its two references"
    assert result.folder.name in page
    result.summary["verdict"] = "a < b & <script>"
    assert "<script>" not in result._repr_html_()
    assert "a &lt; b &amp; &lt;script&gt;" in result._repr_html_()


def test_refused_run_is_a_user_error_and_leaves_nothing(runner: ModuleType) -> None:
    composed = spec_lab.compose(["drafter=none", "acceptance=synthetic"])
    with pytest.raises(UserError):
        spec_lab.run(composed)
    assert not Path("outputs").exists()
    composed = spec_lab.compose()
    composed.config.batch_size = 0
    with pytest.raises(UserError, match="batch_size"):
        spec_lab.run(composed)
    with pytest.raises(UserError, match="dry_run"):
        spec_lab.run(spec_lab.compose(["dry_run=true"]))
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("error", "raised", "status"),
    [
        (RuntimeError("ours"), RuntimeError, "failed"),
        (MemoryError(), UserError, None),
        (FileNotFoundError(2, "No such file", "weights"), UserError, None),
        (KeyboardInterrupt(), KeyboardInterrupt, "interrupted"),
    ],
    ids=["ours", "memory", "file", "ctrl-c"],
)
def test_what_ends_a_run_is_raised_and_on_record(
    runner: ModuleType, error: BaseException, raised: type[BaseException], status: str | None
) -> None:
    def fail(*_: object) -> None:
        raise error

    runner.record_run = fail  # type: ignore[attr-defined]
    with pytest.raises(raised):
        spec_lab.run(spec_lab.compose())
    assert [record["status"] for record in records()] == ([] if status is None else [status])
    runner.record_run = recorded_runner.run  # type: ignore[attr-defined]
    assert spec_lab.run(spec_lab.compose()).summary["status"] == "finished", "the next run is not held up"


def test_torch_is_left_as_it_was(runner: ModuleType) -> None:
    def seeding(*arguments: Any) -> Any:
        torch.manual_seed(1234)
        torch.set_num_threads(3)
        return recorded_runner.run(*arguments)

    runner.record_run = seeding  # type: ignore[attr-defined]
    torch.manual_seed(7)
    state, num_threads = torch.get_rng_state(), torch.get_num_threads()
    spec_lab.run(spec_lab.compose())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == num_threads


def test_so_is_the_random_state_of_a_gpu_in_use(runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def seeding(*arguments: Any) -> Any:
        states[0] = "of the run"
        return recorded_runner.run(*arguments)

    states = ["of the caller"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.__setitem__(device, state))
    runner.record_run = seeding  # type: ignore[attr-defined]
    spec_lab.run(spec_lab.compose())
    assert states == ["of the caller"]


def test_defaults_of_tensors_are_a_process_s_own_meanwhile(runner: ModuleType) -> None:
    def made(*arguments: Any) -> Any:
        inside.append(torch.ones(1))
        assert not torch.is_autocast_enabled("cpu")
        return recorded_runner.run(*arguments)

    inside: list[torch.Tensor] = []
    runner.record_run = made  # type: ignore[attr-defined]
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            spec_lab.run(spec_lab.compose())
        assert torch.ones(1).device.type == "meta" and torch.ones(1).dtype == torch.float64
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert [(tensor.device.type, tensor.dtype) for tensor in inside] == [("cpu", torch.float32)]


@pytest.mark.parametrize(
    "change",
    [
        lambda options: options.pop("drafter"),
        lambda options: options.update(zz="1"),
        lambda options: options.update(drafter="ngram"),
    ],
)
def test_options_that_were_changed_are_refused(change: Callable[[dict[str, str]], None], runner: ModuleType) -> None:
    composed = spec_lab.compose()
    change(composed.options)
    with pytest.raises(UserError, match=r"options names the composed option of each group; .*spec_lab\.compose"):
        spec_lab.run(composed)
    assert "refused: options" in str(composed)


@pytest.mark.skipif(build.problem() is not None, reason="needs a C compiler")
def test_threads_in_c_end_with_their_run(runner: ModuleType) -> None:
    inside: list[int] = []

    def computing(*arguments: Any) -> Any:
        use_threads(5)
        inside.append(num_tasks())
        return recorded_runner.run(*arguments)

    def num_tasks() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    runner.record_run = computing  # type: ignore[attr-defined]
    before = num_tasks()
    spec_lab.run(spec_lab.compose(["kernels=native"]))
    assert inside == [before + 4] and num_tasks() == before


def test_runs_of_two_threads_take_turns(runner: ModuleType) -> None:
    inside, most, guard = 0, 0, threading.Lock()

    def counted(*arguments: Any) -> Any:
        nonlocal inside, most
        with guard:
            inside += 1
            most = max(most, inside)
        threading.Event().wait(0.02)
        with guard:
            inside -= 1
        return recorded_runner.run(*arguments)

    runner.record_run = counted  # type: ignore[attr-defined]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda seed: spec_lab.run(spec_lab.compose([f"seed={seed}"])), range(3)))
    assert most == 1
    assert [result.summary["config"]["seed"] for result in results] == [0, 1, 2]


def test_notebook_has_a_bar_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class ZMQInteractiveShell:
        pass

    ipython = ModuleType("IPython")
    shell: Any = None
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert not progress.in_notebook()
    shell = ZMQInteractiveShell()
    assert progress.in_notebook()
    made: list[dict[str, Any]] = []
    auto = ModuleType("tqdm.auto")

    class Bar:
        def __init__(self, **settings: Any) -> None:
            made.append(settings)

        def set_description(self, name: str) -> None:
            made.append({"stage": name})

        def update(self, steps: int) -> None:
            made.append({"steps": steps})

        def close(self) -> None:
            made.append({"closed": True})

    auto.tqdm = Bar  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm.auto", auto)
    with Progress(4, "request") as shown:
        shown.stage("plain")
        shown.advance(4)
    assert made == [{"total": 4, "unit": "request", "leave": False}, {"stage": "plain"}, {"steps": 4}, {"closed": True}]
    assert capsys.readouterr().err == ""


def page_program() -> str:
    """The first block of Python in docs/use.md; others are parts of extensions."""
    return str(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0])


def test_program_in_the_page_is_five_lines_and_decodes(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len([line for line in page_program().splitlines() if line]) == 5
    small = [
        "debug=smoke",
        "workload.limit=1",
        "max_new_tokens=4",
        "references=[]",
        "kernels=torch",
        "profile_rounds=0",
    ]
    program = page_program().replace('["', f'{small}+["', 1)
    space: dict[str, Any] = {}
    exec(compile(program, "use.md", "exec"), space)
    assert space["result"].summary["status"] == "finished"
    assert space["result"].requests[0]["output_ids"]
    assert "acceptance length" in capsys.readouterr().out
    assert spec_lab.examine(space["config"])


def test_kernels_in_c_without_a_compiler_are_refused(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever asks for them first."""

    def library() -> None:
        raise BuildError("there is no C compiler")

    monkeypatch.setattr(build, "library", library)
    build.problem.cache_clear()
    try:
        with pytest.raises(UserError, match="kernels=native: there is no C compiler; use kernels=torch"):
            spec_lab.run(spec_lab.compose(["debug=smoke", "kernels=native"]))
    finally:
        build.problem.cache_clear()
