"""Machine code is searched for a fault of the assembler: uniform registers that are read and that nothing has written.

ptxas 12.8, which Triton 3.6 and 3.7 bring along, makes such code of attention whose keys are loaded one tile at a time,
without a pipeline: what tells the tensor cores where a tile's weights lie is computed from a register that holds what
earlier kernels left in it. Sums are wrong, and a place outside of shared memory ends in an illegal memory access (H200,
22 November 2026; ptxas 12.9 does not do it). A test on a GPU need not see it, since what was left there may fit.

    python -m tests.machine_code [FOLDER]     every kernel that Triton has compiled into its cache, or into FOLDER
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import triton

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;", re.MULTILINE)
_REGISTER = re.compile(r"\bUR(\d+)\b")
_IS_PREDICATE = re.compile(r"!?U?P(?:\d+|T)")
_WRITES = re.compile(r"U(?!ISETP|PLOP|TMA|BLK|CGABAR)|R2UR|S2UR|VOTEU|REDUX|LDCU")
"""What gives a uniform register a value; others of its kind compare, or move memory."""


def unwritten_reads(listing: str) -> list[str]:
    """Return the instructions of a kernel (`cuobjdump -sass`) that read a uniform register before one wrote it, in the
    order of the text."""
    written: set[int] = set()
    found = []
    for address, name, rest in _INSTRUCTION.findall(listing):
        operands = [part for part in re.split(r",\s*", rest) if part and not _IS_PREDICATE.fullmatch(part)]
        target: set[int] = set()
        if operands and _WRITES.match(name) and (register := _REGISTER.fullmatch(operands[0])):
            size = 2 if ".64" in name or ".WIDE" in name else 1
            target = set(range(int(register[1]), int(register[1]) + size))
            operands = operands[1:]
        if any(_sources(name, operands) - written):
            found.append(f"{address} {name} {rest}")
        written |= target
    return found


def _sources(name: str, operands: list[str]) -> set[int]:
    """Return the numbers of the registers that are read. A descriptor has two; where both operands of a product of the
    tensor cores lie in shared memory four are named by the first, and where one does by the one two before."""
    sources: set[int] = set()
    for place, operand in enumerate(operands):
        for number in map(int, _REGISTER.findall(operand)):
            first, size = number, 2 if name.startswith("U") and ".64" in name else 1
            if f"gdesc[UR{number}]" in operand:
                first, size = (number, 4) if place == 1 else (number + 2, 2)
            elif f"desc[UR{number}]" in operand:
                size = 2
            sources |= set(range(first, first + size))
    return sources


def unwritten_reads_of(cubin: bytes) -> list[str]:
    """Return those of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return unwritten_reads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> int:
    """Print what is found, and return the number of kernels it was found in."""
    kernels = sorted(Path(sys.argv[1] if len(sys.argv) > 1 else triton.knobs.cache.dir).rglob("*.cubin"))
    assert kernels, "no kernels were compiled"
    with ThreadPoolExecutor() as pool:
        reads_of = dict(zip(kernels, pool.map(unwritten_reads_of, map(Path.read_bytes, kernels)), strict=True))
    found = {path: reads for path, reads in reads_of.items() if reads}
    for path, reads in found.items():
        print(path, *reads[:3], sep="\n  ")
    print(f"{len(kernels)} kernels, {len(found)} of them with registers that nothing has written")
    return len(found)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
