"""PTX is read along every path to where a program has waited."""

from __future__ import annotations

import pytest

from tests.early_ptx import faults_before_waiting

NAMES = ["out_ptr", "weight_ptr", "rows_ptr"]


def kernel(*lines: str) -> str:
    places = ("ld.param.b64 %rd1, [k_param_0];", "ld.param.b64 %rd2, [k_param_1];", "ld.param.b64 %rd3, [k_param_2];")
    return "\n".join((".visible .entry k(...)", "{", *places, "add.s64 %rd4, %rd2, %rd9;", *lines, "ret;", "}"))


@pytest.mark.parametrize(
    ("lines", "num_faults"),
    [
        (("ld.global.b32 { %r1 }, [ %rd4 + 0 ];", "griddepcontrol.wait; // dummy", "st.global.b32 [%rd1], %r1;"), 0),
        (("ld.global.b32 { %r1 }, [ %rd3 + 0 ];", "griddepcontrol.wait;"), 1),
        (("cp.async.cg.shared.global [ %r2 + 0 ], [ %rd3 + 0 ], 0x10, %r3;", "griddepcontrol.wait;"), 1),
        (("ld.shared.b64 %rd8, [ %r4 ];", "ld.global.b32 { %r1 }, [ %rd8 + 0 ];", "griddepcontrol.wait;"), 1),
        (("st.global.b32 [%rd1], %r1;", "griddepcontrol.wait;"), 1),
        (("@%p1 bra $L2;", "griddepcontrol.wait;", "$L2:", "ld.global.b32 { %r1 }, [ %rd3 + 0 ];"), 2),
        (("@%p1 bra $L2;", "griddepcontrol.wait;", "bra.uni $L3;", "$L2:", "griddepcontrol.wait;", "$L3:"), 0),
        (("@%p1 ret;", "griddepcontrol.wait;"), 1),
        ((), 1),
    ],
)
def test_what_a_program_does_before_it_waits(lines: tuple[str, ...], num_faults: int) -> None:
    """On one path it may not have waited when it ends; that counts as well."""
    assert len(faults_before_waiting(kernel(*lines), NAMES, ("weight_ptr",))) == num_faults
