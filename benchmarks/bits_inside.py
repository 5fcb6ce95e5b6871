"""`bits.py` starts this program inside the checkout whose bits are recorded: it decodes or compiles, and writes hashes.

    python benchmarks/bits_inside.py OUT.json cpu < LINES    one run in each line; none begins after $BITS_LIMIT seconds
    python benchmarks/bits_inside.py OUT.json gpu < LINES    on a GPU
    python benchmarks/bits_inside.py OUT.json kernels        every kernel compiled ahead for an H200, without a GPU

Rules, drafters and caches are hooked when they are made, and the tensors that go through them are hashed. Hashing is a
torch operator, so the graph recorder of a CPU replays it with the other operators. A CUDA graph cannot contain it. So
on a GPU logits are hashed only in rounds that are not captured; tokens, caches, nodes and the sequence of kernels are
recorded in all.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gzip
import hashlib
import importlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# If the lab renames something, only these names have to be changed. Old names may stay after new ones. The program also
# uses `spec_lab.compose`, `spec_lab.run`, keys of configurations and records, and the trace in a run's folder.
PARTS = ("spec_lab.engine.parts.Parts", "spec_lab.engine.round.Parts")
"""The class of an engine's parts. Each engine makes one, with a `rule`, a `drafter` and others."""
CACHE = ("spec_lab.core.kv_cache.PagedKVCache",)
"""The class of caches: with `num_pages`, `tensors` [layers, slots, ...] that consist of pages, and `recurrent` caches
with a row for each request slot."""
SCRATCH_PAGE = ("spec_lab.core.kv_cache.SCRATCH_PAGE",)
FIRST, JUDGE = "first_tokens", ("accept", "walk")
"""Methods of a rule. The first gets a prompt's logits. The others get a verified round; a rule may lack one of them."""
BEGIN, STEP = "catch_up", "step"
"""Methods of a drafter. The first gets a verified round and returns a state. The second gets that state and changes
it."""
JUDGED = dict.fromkeys(("draft_tokens", "tokens", "parents"), "drafts")
JUDGED |= {"logits": "logits", "draft_logits": "draft logits"}
"""Fields of a verified round, each with the part that it is recorded as. A field that is missing or None is left
out."""
COMPILE_ALL = ("tests.test_kernels_compile.main",)
"""The function that compiles every kernel with `triton.compile`."""

Entry = dict[str, list[str]]
"""Hashes in the order in which they were taken, by the part that they belong to."""


def found(names: Sequence[str]) -> Any:
    """Return the object that the first existing one of `names` refers to."""
    for name in names:
        module, _, attribute = name.rpartition(".")
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), attribute)
    raise LookupError(f"none of {names} is in this checkout; say in {__file__} what it is called now")


def digest(data: bytes) -> str:
    """Return the beginning of a SHA-256."""
    return hashlib.sha256(data).hexdigest()[:10]


def hashed(tensor: Any) -> str:
    """Hash type, shape and bytes of a tensor."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    return digest(f"{plain.dtype}{list(plain.shape)}".encode() + plain.view(-1).view(torch.uint8).numpy().tobytes())


class Watch:
    """Hashes what goes through the parts of engines made after `install`, and keeps the hashes in `entry` until
    `take`."""

    def __init__(self) -> None:
        self.entry: dict[str, list[str]] = defaultdict(list)
        self._caches: list[Any] = []
        self._active: Any = None  # [batch] whether a row is of a running request; None if all are

    def install(self) -> None:
        """Hook the constructors of the two classes whose instances lead to everything that is hashed."""
        import torch

        self._library = torch.library.Library("spec_bits", "DEF")
        # The schema says that the operator writes to `rows`, though it does not. The recorder would not replay an
        # operator that writes nothing.
        self._library.define("note(Tensor(a!) rows, Tensor? active, str part) -> ()")
        self._library.impl("note", self._note, "CompositeExplicitAutograd")
        self._scratch = found(SCRATCH_PAGE)
        _behind_init(found(PARTS), self._watch)
        _behind_init(found(CACHE), self._caches.append)

    def take(self) -> Entry:
        """Hash the caches at the end of a run, except rows that belong to no request. Return all hashes, and begin a
        new entry."""
        for cache in self._caches:
            for tensor in cache.tensors:
                pages = tensor.unflatten(1, (cache.num_pages, -1))
                self.entry["caches"] += [hashed(pages[:, : self._scratch]), hashed(pages[:, self._scratch + 1 :])]
            for states in cache.recurrent:
                self.entry["caches"] += [hashed(tensor[:-1]) for tensor in _tensors_of(states)]
        entry, self.entry, self._active = dict(self.entry), defaultdict(list), None
        self._caches.clear()
        return entry

    def _watch(self, parts: Any) -> None:
        rule, drafter = parts.rule, parts.drafter
        self._scratch_slot = parts.slots.table.scratch_slot
        _around(rule, FIRST, before=self._first)
        for name in JUDGE:
            if hasattr(rule, name):
                _around(rule, name, before=self._judged)
        _around(drafter, BEGIN, before=self._begun, behind=lambda state, *_: self._state(state))
        _around(drafter, STEP, behind=lambda _, state, *__: self._state(state))

    def _first(self, logits: Any, slot_ids: Any, *_: Any) -> None:
        # Warm-ups of captured prompts have the scratch slot, in whose page rows without a place meet.
        self._active = slot_ids != self._scratch_slot
        self._keep("first logits", logits)

    def _judged(self, verified: Any, *_: Any) -> None:
        self._active = verified.active
        for name, part in JUDGED.items():
            if getattr(verified, name, None) is not None:
                self._keep(part, getattr(verified, name))

    def _begun(self, verified: Any) -> None:
        self._active = verified.batch.active

    def _state(self, state: Any) -> None:
        """Hash the floats of a drafter's state, which its model computed. The state of a lookup has none."""
        for tensor in _tensors_of(state, deep=False):
            if tensor.is_floating_point():
                self._keep("draft states", tensor)

    def _keep(self, part: str, rows: Any) -> None:
        """Hash [batch, ...] rows now, and in each replay if a graph is being recorded."""
        import torch

        torch.ops.spec_bits.note(rows, self._active, part)

    def _note(self, rows: Any, active: Any, part: str) -> None:
        import torch

        if rows.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if active is not None:
            if not active.any():
                return  # a graph is captured over rows that nobody reads
            rows = rows.reshape(len(active), -1)[active]
        self.entry[part].append(hashed(rows))


def _behind_init(kind: Any, seen: Callable[[Any], None]) -> None:
    """Call `seen` with every instance of a class that is made from now on."""
    made = kind.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        seen(self)

    kind.__init__ = init


def _around(
    part: Any, name: str, before: Callable[..., None] | None = None, behind: Callable[..., None] | None = None
) -> None:
    """Wrap a method of one object: call `before` with its arguments, and `behind` with its result and its arguments."""
    method = getattr(part, name)
    if hasattr(method, "is_watched"):
        return

    def watched(*args: Any, **options: Any) -> Any:
        given = *args, *options.values()
        if before is not None:
            before(*given)
        result = method(*args, **options)
        if behind is not None:
            behind(result, *given)
        return result

    watched.is_watched = True  # type: ignore[attr-defined]
    setattr(part, name, watched)


def _tensors_of(value: Any, deep: bool = True) -> Iterator[Any]:
    """Yield the tensors in an object, in the order of their names; if `deep`, also those of the dataclasses in it."""
    import torch

    names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else vars(value)
    for part in (getattr(value, name) for name in sorted(names)):
        if isinstance(part, torch.Tensor):
            yield part
        elif deep and dataclasses.is_dataclass(part):
            yield from _tensors_of(part)


def run_line(line: str, watch: Watch) -> Entry:
    """Do the run of a line, and return its hashes. If it fails, return the error, and drop its hashes."""
    import spec_lab

    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            result = spec_lab.run(spec_lab.compose([*line.split(), f"output_dir={folder}"]))
            nodes = [f"{name} {count}" for name, count in sorted(result.run.under("graph.nodes").items())]
            entry = {"tokens": [_tokens(row) for row in result.requests], "nodes": nodes}
            return entry | watch.take() | _sequence(result.folder / "trace.json.gz")
    except Exception as error:
        watch.take()
        return {"failed": [f"{type(error).__name__}: {error}"]}


def _tokens(row: Any) -> str:
    shown = [getattr(row, key) for key in ("output_ids", "accepted_per_round", "emitted_per_round", "finish_reason")]
    return digest(json.dumps(shown).encode())


def _sequence(trace: Path) -> Entry:
    """Return the kernels of the profiled rounds in the order in which each stream ran them; a CPU has none."""
    if not trace.exists():
        return {}
    with gzip.open(trace, "rb") as file:
        events = json.load(file)["traceEvents"]
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    work.sort(key=lambda event: (str(event["args"].get("stream")), event["ts"]))
    return {"sequence": [f"{event['name'][:48]} {event['args'].get('grid', '')}" for event in work]} if work else {}


def watched_compiler() -> dict[str, set[str]]:
    """Return a mapping to which each kernel is added that Triton compiles from now on or takes from its cache: hashes
    of its signature and of its PTX.

    TRITON_DISABLE_LINE_INFO=1 keeps lines of the source out of it.
    """
    import triton

    seen: dict[str, set[str]] = defaultdict(set)

    def compiled(*, src: Any, metadata: Any, metadata_group: Any, **_: Any) -> None:
        (path,) = (path for name, path in metadata_group.items() if name.endswith(".ptx"))
        options = [metadata.get(key) for key in ("num_warps", "num_stages", "launch_pdl")]
        form = repr((sorted(src.signature.items()), sorted(map(repr, src.constants.items())), options))
        seen[src.name].add(f"{digest(form.encode())} {digest(Path(path).read_bytes())}")

    triton.knobs.compilation.listener = compiled
    return seen


def machine(on_gpu: bool) -> dict[str, str]:
    """Return what bits depend on besides the source."""
    import torch
    import triton

    known = {"Python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    if on_gpu:
        return known | {"GPU": torch.cuda.get_device_name()}
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    compiler = subprocess.run("cc --version", shell=True, capture_output=True, text=True, check=False).stdout
    return known | {
        "CPU": f"{cpu[1] if cpu else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "libraries": digest(torch.__config__.show().encode()),
        "C compiler": compiler.partition("\n")[0],
    }


def main(out: Path, what: str) -> None:
    """Write the hashes to `out`, which is a complete file after each run."""
    # An editable install would be imported in place of the path, with the configuration of another checkout.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
    import spec_lab

    assert Path(spec_lab.__file__).resolve().is_relative_to(Path.cwd()), f"{spec_lab.__file__} is not of this checkout"
    runs: dict[str, Entry] = {}
    compiled, known = watched_compiler(), machine(what == "gpu")

    def write() -> None:
        seen = {f"kernel {name}": {"ptx": sorted(forms)} for name, forms in sorted(compiled.items())}
        out.write_text(json.dumps({"machine": known, "runs": runs | seen}))

    if what == "kernels":
        found(COMPILE_ALL)()
        write()
        return
    watch = Watch()
    watch.install()
    write()
    lines, limit = sys.stdin.read().splitlines(), time.monotonic() + float(os.environ["BITS_LIMIT"])
    for number, line in enumerate(lines, 1):
        if time.monotonic() > limit:
            print(f"out of time: the last {len(lines) - number + 1} runs were not begun", file=sys.stderr)
            return
        begun = time.monotonic()
        runs[line] = run_line(line, watch)
        write()
        said = f"{number}/{len(lines)} {time.monotonic() - begun:5.1f} s {line}"
        print(said, *runs[line].get("failed", []), file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("what", choices=("cpu", "gpu", "kernels"))
    options = parser.parse_args()
    main(options.out, options.what)
