"""What all tests share: no oversubscribed cores, no plots on a screen, GPU tests skipped where there is none."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

import spec_lab.options  # noqa: F401  registers the options
from tests.fake_runner import FakeRunner

if TYPE_CHECKING:
    from tests.lab import Reference

# Tiny operators: a second thread on a busy core costs more than it brings.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Tables in one piece; tests of narrow terminals set their own.
os.environ["COLUMNS"] = "250"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# It makes 38 grammars when it is imported, for which nbformat's jsonschema has no use: three seconds of every process.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


# Read when triton is imported, which any test may do first: it must be set before a test module is imported.
if not has_cuda():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if find_spec("triton") is not None:
    from tests import interpreter

    interpreter.install()
# A shell ignores Ctrl-C for what it starts in the background, and processes inherit that: the tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, so that what passed passes again; SPEC_LAB_EXAMPLES throws others, and more.
settings.register_profile("spec_lab", deadline=None, derandomize="SPEC_LAB_EXAMPLES" not in os.environ)
settings.load_profile("spec_lab")


def pytest_configure(config: pytest.Config) -> None:
    """Run what is asked for by node id whatever its tier, unless the command chooses with -m itself."""
    words = [str(word) for word in config.invocation_params.args]
    is_worker = hasattr(config, "workerinput")  # of xdist: it is handed what the first process has made of the command
    if not is_worker and not any(word.startswith("-m") for word in words) and any("::" in word for word in words):
        config.option.markexpr = ""


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what costs.json names, and refuse names of no test: a test that is renamed would run by default unseen."""
    slow: dict[str, dict[str, float]] = json.loads(Path(__file__).with_name("costs.json").read_text())
    collected: dict[str, set[str]] = {}
    for item in items:
        file, name = item.nodeid.split("::", 1)
        collected.setdefault(file, set()).add(name)
        if name in slow.get(file, {}):
            item.add_marker(pytest.mark.slow)
    whole_files = not config.getoption("lf", False) and not any("::" in argument for argument in config.args)
    if whole_files and not has_cuda():  # weights need not travel to a GPU machine, and tests are collected by them
        gone = [f"{file}::{name}" for file in collected for name in slow.get(file, {}) if name not in collected[file]]
        gone += [file for file in slow if not (config.rootpath / file).exists()]
        assert not gone, f"costs.json names tests that are not there: {', '.join(gone)}"
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    if not has_cuda():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@dataclass
class Frozen:
    """What the collector no longer looks at: the objects of so many modules, and what files of tests before left."""

    num_modules: int = 0
    file: str = ""

    def refresh(self, file: str) -> None:
        if (len(sys.modules), file) != (self.num_modules, self.file):
            gc.collect()
            gc.freeze()
            self.num_modules, self.file = len(sys.modules), file


FROZEN = Frozen()


@pytest.fixture(autouse=True)
def frozen(request: pytest.FixtureRequest) -> None:
    """Keep the collector off what imports and other files' tests left behind: a run collects garbage before each pass
    it times, and through the modules of torch and transformers that takes longer than the tiny pass."""
    FROZEN.refresh(str(request.path))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """A run says how many threads torch has, and leaves it so. Of tiny operators a second one only waits, which costs
    as much as work does, in that test and in all behind it."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a tiny target with a tokenizer, and of a random EAGLE-3 head for it. No test changes them."""
    from tests.tiny_runs import make_runnable_pair

    return make_runnable_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """The folder of a tiny Qwen3 of 8 layers, and its model in transformers."""
    from tests.lab import Reference
    from tests.tiny_checkpoints import make_tiny_target

    folder = tmp_path_factory.mktemp("target")
    make_tiny_target(folder, "qwen3")
    return folder, Reference(folder)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    fake = FakeRunner()
    module = ModuleType("spec_lab.measure.runner")
    module.record_run = fake.record_run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spec_lab.measure.runner", module)
    return fake
