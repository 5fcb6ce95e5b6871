"""Records hashes of what the lab computes, and says which of them another revision changed.

    python benchmarks/bits.py record new.json                       this checkout, on a CPU
    python benchmarks/bits.py record old.json --checkout FOLDER     another one, by the runs and the eyes of this one
    python benchmarks/bits.py compare old.json new.json             what differs; exit code 1 where anything does
    python benchmarks/bits.py compare old.json                      with this checkout, recorded now
    python benchmarks/bits.py record gpu.json --gpu --limit 200     on a GPU, the runs that begin within 200 seconds
    python benchmarks/bits.py record ms.json --gpu --only h200      ten rounds of `h200_round.py`: their nodes and time

Of a run: tokens, logits of every verified round, drafts, what a draft model puts out, the caches at the end, nodes of
graphs, on a GPU the sequence of kernels. Of every kernel: its PTX, compiled ahead, on a GPU as it was launched. Bits
follow from the machine too (BLAS, compiler), so records of different machines are not compared. `make bits` compares
this checkout with BASE.
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
"""Drafters whose state has floats between steps; a draft model of its own has tokens alone."""
KERNELS, TIMES = "ptx", "h200"
"""What `--only` calls kernels compiled ahead, and rounds that are timed, which are recorded when asked for."""
ROUNDS = "512 in"
"""The cells of `h200_round.py` that are timed: ten."""
WITHIN = 0.01
"""The part of a round's time by which it may be longer, and nothing is said."""

Record = dict[str, Any]


class RecordError(Exception):
    """A record says nothing: it is of another machine, or has a hole."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 where nothing differs, 1 where something does, 2 where a record could not be made or compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("other", type=Path, nargs="?", help="of compare: a second record; none is this checkout")
    parser.add_argument("--checkout", type=Path, default=HERE.parents[1], help="the folder whose bits are recorded")
    parser.add_argument("--only", default="", help="runs whose line has this in it, ptx, or h200")
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
    """Decode, compile and time in processes of their own, whose path leads to the checkout."""
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
    """Return what git calls the checkout; nothing of a folder without its history."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    if not (checkout / ".git").exists():
        return ""
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False).stdout.strip()


def _look_inside(
    checkout: Path, made: Record, what: str, lines: Sequence[str] = (), limit: float = float("inf")
) -> None:
    """Put into a record what `bits_inside.py` sees, also where it ends early."""
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
    """Put into a record what ten cells of the checkout's table of rounds come to."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(checkout / "benchmarks" / "h200_round.py"), folder, "--only", ROUNDS]
        made["trouble"] += _start(command, checkout, {})
        with (Path(folder) / "rounds.csv").open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                made["ms"][row["cell"]] = float(row["ms a round"])
                made["runs"][f"rounds {row['cell']}"] = {"nodes": [row["nodes"]]}


def _start(command: list[str], checkout: Path, changes: dict[str, str], lines: str = "") -> list[str]:
    """Run a program of Python on a checkout, and return what there is to say if it failed."""
    path = os.pathsep.join([str(checkout), str(checkout / "kernels"), os.environ.get("PYTHONPATH", "")])
    ours = {"PYTHONPATH": path, "TRITON_DISABLE_LINE_INFO": "1", **changes}
    others = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command], cwd=checkout, env=others | ours, input=lines, text=True, check=False
    )
    return [f"{' '.join(command)} ended with exit code {done.returncode}"] if done.returncode else []


def _write(made: Record, file: Path) -> int:
    """Write a record, also one with holes, which are said."""
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
        RecordError: one of them has a hole, or they are of different machines.
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
    """Say what ended early, and of each run what had to be seen of it, and was not."""
    found = [f"{made['source']}: {trouble}" for trouble in made["trouble"]]
    for line, seen in made["runs"].items():
        missing = [part for part in _expected(line) if not seen.get(part)]
        if missing:
            why = seen.get("failed", ["the names in bits_inside.py may lead nowhere"])[0]
            found.append(f"{made['source']}, {line}: nothing seen of {', '.join(missing)}; {why}")
    return found


def _expected(line: str) -> list[str]:
    """Return what has to be seen of a run, a kernel or a timed round."""
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
        # What all runs have in common says nothing.
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
    """Say from which of its hashes on a part differs, and in how many."""
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
