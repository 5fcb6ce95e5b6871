"""Machine code is searched for a fault of the assembler: what tells the tensor cores where a tile lies is computed from
a wrong register.

ptxas 12.8, which Triton 3.6 and 3.7 bring along, makes such code of attention whose keys are loaded one tile at a time,
without a pipeline. The place of a tile's weights is computed from a register that nothing has written, so that it holds
what earlier kernels left in it, or from one that another instruction of the kernel wrote for itself. Sums are wrong,
and a place outside of shared memory ends in an illegal memory access (H200, 22 and 23 November 2026; ptxas 12.9 does
not do it). A test on a GPU need not see it, since what was left there may fit.

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
_UPPER_HALF = re.compile(r"(UR\d+), (-?0x[0-9a-f]{8}), URZ, UP\d, !UPT")
_SWIZZLE_AND_STRIDE = 0xC000FFFF
"""The upper half of a tile's descriptor has its swizzling in two bits and a stride in sixteen."""


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


def wrong_descriptors(listing: str) -> list[str]:
    """Return the instructions that make the upper half of a tile's descriptor from what lies there and a carry, where
    the register that they add to has not just been set to 0."""
    written_by: dict[str, str] = {}
    found = []
    for address, name, rest in _INSTRUCTION.findall(listing):
        target, _, operands = rest.partition(", ")
        half = _UPPER_HALF.fullmatch(operands) if name == "UIADD3.X" else None
        is_descriptor = half is not None and int(half[2], 16) & 0xFFFFFFFF & ~_SWIZZLE_AND_STRIDE == 0
        if half is not None and is_descriptor and written_by.get(half[1]) != "UMOV URZ":
            found.append(f"{address} {name} {rest}")
        if _WRITES.match(name):
            written_by[target] = f"{name} {operands}"
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


def faults_of(cubin: bytes) -> list[str]:
    """Return the faulty instructions of a compiled kernel, of both kinds, each once."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(dict.fromkeys(unwritten_reads(listing) + wrong_descriptors(listing)))


def main() -> int:
    """Print what is found, and return the number of kernels it was found in."""
    kernels = sorted(Path(sys.argv[1] if len(sys.argv) > 1 else triton.knobs.cache.dir).rglob("*.cubin"))
    assert kernels, "no kernels were compiled"
    with ThreadPoolExecutor() as pool:
        all_faults = dict(zip(kernels, pool.map(faults_of, map(Path.read_bytes, kernels)), strict=True))
    found = {path: faults for path, faults in all_faults.items() if faults}
    for path, faults in found.items():
        print(path, *faults[:3], sep="\n  ")
    print(f"{len(kernels)} kernels, {len(found)} of them with wrong registers")
    return len(found)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
