"""Records hashes of what the lab computes, and says which of them another revision changed.

    python benchmarks/bits.py record new.json                       this checkout, on a CPU
    python benchmarks/bits.py record old.json --checkout FOLDER     another one, with the runs and the hooks of this one
    python benchmarks/bits.py compare old.json new.json             what differs; exit code 1 if anything does
    python benchmarks/bits.py compare old.json                      with this checkout, recorded now
    python benchmarks/bits.py record gpu.json --gpu --limit 200     on a GPU, the runs that begin within 200 seconds
    python benchmarks/bits.py record ms.json --gpu --only h200      ten cells of `h200_round.py`: graph nodes and times

For a run it hashes the tokens, the logits of every verified round, the drafts, the states between draft steps, and the
caches at the end. It also records the nodes of graphs, and on a GPU the sequence of kernels. For a kernel it hashes the
PTX: compiled ahead of time, or on a GPU as it was launched. Bits also depend on the machine (BLAS, compiler), so
records of different machines are not compared. `make bits` compares this checkout with BASE.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bits_runs

HERE = Path(__file__).resolve()
STATED = ("eagle3", "mtp_eagle", "mtp_vanilla", "frozen_kv")
"""Drafters whose state between draft steps has floats. The state of drafter=draft_model has only tokens."""
KERNELS, TIMES = "ptx", "h200"
"""The values of `--only` for kernels compiled ahead of time, and for timed rounds. Rounds are timed only with this
value."""
ROUNDS = "512 in"
"""A part of the name of the ten cells of `h200_round.py` that are timed."""
WITHIN = 0.01
"""The fraction by which a round's time may differ without being reported."""

Record = dict[str, Any]


class RecordError(Exception):
    """A record cannot be made or compared: it is of another machine, or a part is missing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 where nothing differs, 1 where something does, 2 where a record could not be made or compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("other", type=Path, nargs="?", help="for compare: a second record (default: this checkout)")
    parser.add_argument("--checkout", type=Path, default=HERE.parents[1], help="the folder whose bits are recorded")
    parser.add_argument("--only", default="", help="only the runs whose line has this in it; or ptx, or h200")
    parser.add_argument("--gpu", action="store_true", help="the runs of a GPU")
    parser.add_argument("--limit", type=float, default=float("inf"), help="begin no run later than so many seconds")
    options = parser.parse_args(arguments)
    try:
        if options.verb == "record":
            return _write(_record(options.gpu, options.only, options), options.file)
        old = _read(options.file)
        new = _read(options.other) if options.other else _record(old["gpu"], old["only"], options)
        return _told(old, new)
    except (RecordError, OSError) as error:
        print(f"bits: {error}", file=sys.stderr)
        return 2


def _record(on_gpu: bool, only: str, options: argparse.Namespace) -> Record:
    """Decode, compile and time in separate processes, which import the lab from the checkout."""
    checkout = options.checkout.resolve()
    made: Record = {"source": f"{checkout} {_revision(checkout)}", "gpu": on_gpu, "only": only}
    made |= {"machine": {}, "runs": {}, "ms": {}, "trouble": []}
    lines = [line for line in (bits_runs.ON_GPU if on_gpu else bits_runs.ON_CPU) if only in line]
    if lines or only == TIMES:
        _look_inside(checkout, made, "gpu" if on_gpu else "cpu", lines, options.limit)
    if not on_gpu and only in ("", KERNELS):
        _look_inside(checkout, made, "kernels")
    if on_gpu and only == TIMES:
        _time_rounds(checkout, made)
    if not made["runs"] and not made["trouble"]:
        raise RecordError(f"no run has {only!r} in its line")
    return made


def _revision(checkout: Path) -> str:
    """Return git's name of the checkout's state; empty for a folder without `.git`."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    if not (checkout / ".git").exists():
        return ""
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False).stdout.strip()


def _look_inside(
    checkout: Path, made: Record, what: str, lines: Sequence[str] = (), limit: float = float("inf")
) -> None:
    """Add to a record what `bits_inside.py` saw, even if it ended early."""
    changes = {"BITS_LIMIT": str(limit), "OMP_NUM_THREADS": "1", **({"TRITON_INTERPRET": "1"} if what == "cpu" else {})}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seen.json"
        command = [str(HERE.with_name("bits_inside.py")), str(out), what]
        made["trouble"] += _start(command, checkout, changes, "\n".join(lines))
        if out.exists():
            seen = json.loads(out.read_text(encoding="utf-8"))
            made["machine"] = seen["machine"]
            made["runs"] |= seen["runs"]


def _time_rounds(checkout: Path, made: Record) -> None:
    """Time ten cells of the checkout's `h200_round.py`, and add their times and graph nodes to a record."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(checkout / "benchmarks" / "h200_round.py"), folder, "--only", ROUNDS]
        made["trouble"] += _start(command, checkout, {})
        with (Path(folder) / "rounds.csv").open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                made["ms"][row["cell"]] = float(row["ms a round"])
                made["runs"][f"rounds {row['cell']}"] = {"nodes": [row["nodes"]]}


def _start(command: list[str], checkout: Path, changes: dict[str, str], lines: str = "") -> list[str]:
    """Run a Python program on a checkout, and return a message if it failed."""
    path = os.pathsep.join([str(checkout), str(checkout / "kernels"), os.environ.get("PYTHONPATH", "")])
    ours = {"PYTHONPATH": path, "TRITON_DISABLE_LINE_INFO": "1", **changes}
    others = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command], cwd=checkout, env=others | ours, input=lines, text=True, check=False
    )
    return [f"{' '.join(command)} ended with exit code {done.returncode}"] if done.returncode else []


def _write(made: Record, file: Path) -> int:
    """Write a record, even an incomplete one, and print what is missing in it."""
    file.write_text(json.dumps(made, indent=0), encoding="utf-8")
    found = holes(made)
    for hole in found:
        print(hole, file=sys.stderr)
    print(f"{file}: {len(made['runs'])} runs and kernels of {made['source']}")
    return 2 if found else 0


def _read(file: Path) -> Record:
    made: Record = json.loads(file.read_text(encoding="utf-8"))
    return made


def _told(old: Record, new: Record) -> int:
    """Print how two records differ.

    Raises:
        RecordError: one of them is incomplete, or they are of different machines.
    """
    for hole in (*holes(old), *holes(new)):
        raise RecordError(hole)
    different = differences(old, new)
    slower = [
        f"{cell}: {old['ms'][cell]:.2f} ms a round, then {ms:.2f}"
        for cell, ms in new["ms"].items()
        if cell in old["ms"] and abs(ms / old["ms"][cell] - 1) > WITHIN
    ]
    for line in (*different, *slower):
        print(line)
    names = old["runs"] | new["runs"]
    print(f"{len(different)} of {len(names)} runs and kernels differ: {old['source']}, then {new['source']}")
    return 1 if different else 0


def holes(made: Record) -> list[str]:
    """Return a line for each program that failed, and for each run of which an expected part was not recorded."""
    found = [f"{made['source']}: {trouble}" for trouble in made["trouble"]]
    for line, seen in made["runs"].items():
        missing = [part for part in _expected(line) if not seen.get(part)]
        if missing:
            why = seen.get("failed", ["a name in bits_inside.py may not exist in this checkout"])[0]
            found.append(f"{made['source']}, {line}: nothing seen of {', '.join(missing)}; {why}")
    return found


def _expected(line: str) -> list[str]:
    """Return the parts that must be recorded of a run, a kernel or a timed round."""
    kind = line.split()[0]
    if kind in ("kernel", "rounds"):
        return ["ptx" if kind == "kernel" else "nodes"]
    words = dict(word.partition("=")[::2] for word in line.split())
    is_eager, on_gpu = words["graph"] == "eager", words["device"] != "cpu"
    parts = ["tokens", "caches", *["nodes"] * (not is_eager), *["sequence"] * on_gpu]
    if on_gpu and not is_eager:
        return parts
    parts += ["first logits", "logits", *["drafts"] * (words["drafter"] != "none")]
    is_drawn = words.get("drafter.draft_sampling") == "distribution"
    return [*parts, *["draft states"] * (words["drafter"] in STATED), *["draft logits"] * is_drawn]


def differences(old: Record, new: Record) -> list[str]:
    """Return a line for each run or kernel that is not the same in both.

    Raises:
        RecordError: they are of different machines.
    """
    one, other = old["machine"], new["machine"]
    unlike = [f"{key} {one.get(key)} and {other.get(key)}" for key in one | other if one.get(key) != other.get(key)]
    if unlike:
        raise RecordError(f"records of different machines, whose bits differ anyway: {'; '.join(unlike)}")
    names = list(old["runs"] | new["runs"])
    runs = [set(name.split()) for name in names if not name.startswith(("kernel", "rounds"))]
    told = []
    for name in names:
        before, after = old["runs"].get(name), new["runs"].get(name)
        if before == after:
            continue
        # Words that all runs have in common are left out.
        short = " ".join(word for word in name.split() if len(runs) < 2 or word not in set.intersection(*runs))
        if before is None or after is None:
            told.append(f"{short}: only in the {'second' if before is None else 'first'} record")
        else:
            parts = sorted(part for part in before | after if before.get(part) != after.get(part))
            told.append(
                f"{short}: {'; '.join(_difference(part, before.get(part, []), after.get(part, [])) for part in parts)}"
            )
    return told


def _difference(part: str, before: list[str], after: list[str]) -> str:
    """Say at which of its hashes a part first differs, and how many of them differ."""
    shared = list(zip(before, after, strict=False))
    unlike = [index for index, (one, other) in enumerate(shared) if one != other]
    if not unlike:
        return f"{part} {len(before)} times, then {len(after)}, the first {len(shared)} the same"
    place = f"{part} from {unlike[0] + 1} of {len(before)} on, {len(unlike)} in all"
    longer = "" if len(before) == len(after) else f", then {len(after)}"
    readable = f" ({before[unlike[0]]}, then {after[unlike[0]]})" if part in ("nodes", "sequence", "failed") else ""
    return place + longer + readable


if __name__ == "__main__":
    sys.exit(main())
