"""kernels=native for processors that this one is not: results beside plain loops, and machine code without spills.

`make arm` runs these tests. Those of Arm need Debian's packages gcc-aarch64-linux-gnu and qemu-user.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from spec_kernels.native import build
from spec_kernels.native.compiler import FLAGS, HERE

DRIVER = Path(__file__).with_name("native_driver.c")
PROGRAM = [flag for flag in FLAGS if flag != "-shared"]
IS_X86 = platform.machine() == "x86_64"
CROSS = "aarch64-linux-gnu-gcc"
GCC = next((path for path in build.compilers() if "gcc" in Path(path).name), None)
REGISTER = {"avx2": r"%ymm\d+", "neon": r"\b[qv]\d+\b"}
NUM_VECTORS = {"avx2": 2, "neon": 4}
COLUMNS = {"avx2": (4, 2, 1, 1, 1, 1), "neon": (4, 2, 1, 1, 1, 1)}
"""How many columns of 16 outputs the tile of 1 to 6 rows has."""

needs_arm = pytest.mark.skipif(not shutil.which(CROSS), reason=f"needs {CROSS} (apt-get install gcc-aarch64-linux-gnu)")
needs_x86 = pytest.mark.skipif(not IS_X86 or GCC is None, reason="needs GCC on x86-64")


def run(*command: str | Path | None) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_x86
@pytest.mark.parametrize(("processor", "registers"), [("haswell", "avx2"), ("x86-64", "other")])
def test_registers_that_this_processor_has_beside_others(processor: str, registers: str, tmp_path: Path) -> None:
    run(GCC, *PROGRAM, f"-march={processor}", DRIVER, "-o", tmp_path / "driver", "-lm")
    if processor == "haswell" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs AVX2")
    assert run(tmp_path / "driver").startswith(f"{registers} registers: 0 of")


@needs_arm
@pytest.mark.skipif(not shutil.which("qemu-aarch64"), reason="needs qemu-aarch64 (apt-get install qemu-user)")
def test_arm_under_qemu(tmp_path: Path) -> None:
    run(CROSS, *PROGRAM, "-static", DRIVER, "-o", tmp_path / "driver", "-lm")
    assert run("qemu-aarch64", tmp_path / "driver").startswith("neon registers: 0 of")


@pytest.mark.parametrize("is_narrow", [False, True], ids=["floats", "halves"])
@pytest.mark.parametrize(
    ("compiler", "processor", "registers"),
    [
        pytest.param(GCC, ("-march=haswell",), "avx2", marks=needs_x86),
        pytest.param(CROSS, (), "neon", marks=needs_arm),
    ],
    ids=["avx2", "neon"],
)
def test_the_sums_of_a_tile_stay_in_registers(
    compiler: str, processor: tuple[str, ...], registers: str, is_narrow: bool
) -> None:
    """The loop over inputs multiplies once for each vector of sums and each input. It stores no vector, and loads none
    from the stack."""
    text = run(compiler, *FLAGS, *processor, "-S", HERE / "native.c", "-o", "-")
    for rows, columns in enumerate(COLUMNS[registers], 1):
        loop = inner_loop(text, f"{'halves' if is_narrow else 'floats'}_{rows}")
        width, num_inputs = columns * NUM_VECTORS[registers], 2 if is_narrow else 1
        vectors = [line for line in loop if re.search(REGISTER[registers], line)]
        num_sums = sum("vfmadd" in line or "fmla" in line for line in vectors)
        assert num_sums and num_sums % (width * rows * num_inputs) == 0  # some loops are unrolled
        stored = [line for line in vectors if re.search(r"\sst[rp]\s|%ymm\d+, [^%]*\(", line)]
        spilled = [line for line in vectors if re.search(r"\[sp|\(%r[sb]p", line)]
        assert not stored and not spilled, (rows, stored, spilled)


def inner_loop(text: str, function: str) -> list[str]:
    """Return the instructions of the innermost loop of a function that has the most multiplications."""
    whole = re.search(rf"^{function}:\n(.*?)^\s+\.size\s+{function},", text, re.M | re.S)
    assert whole, f"no function {function}"
    lines = whole[1].splitlines()
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.match(r"\.L\w+:$", line)}
    jumps = [(at, re.search(r"^\s+(?:j|b|cb)\w*.*(\.L\w+)$", line)) for at, line in enumerate(lines)]
    loops = [(labels[to[1]], at) for at, to in jumps if to and labels[to[1]] < at]
    inner = [
        lines[first : last + 1]
        for first, last in loops
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in loops)
    ]
    return max(inner, key=lambda loop: sum("fm" in line for line in loop))
