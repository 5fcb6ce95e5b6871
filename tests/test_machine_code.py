"""Listings of machine code are read for registers that nothing has written, and for wrong places of tiles."""

from __future__ import annotations

import pytest

from tests.machine_code import unwritten_reads, wrong_descriptors

FAULTY = """
        /*08f0*/                   USHF.R.U32.HI UR36, URZ, 0x4, UR4 ;                     /* 0x0000000400247899 */
        /*0930*/                   UIADD3 UR26, UP0, UR26, 0x20, URZ ;                     /* 0x000000201a1a7890 */
        /*09b0*/                   UIADD3.X UR27, UR27, -0x3ffffff0, URZ, UP0, !UPT ;      /* 0xc00000101b1b7890 */
"""
"""What ptxas 12.8 made of attention of one stage; UR36 should stand in the place of UR26."""


def listing(*instructions: str) -> str:
    return "\n".join(f"  /*{16 * place:04x}*/  {text} ;  /* 0x0 */" for place, text in enumerate(instructions))


def test_what_the_assembler_did_is_found() -> None:
    found = unwritten_reads("        /*0010*/  ULDC UR4, c[0x0][0x210] ;" + FAULTY)
    assert [line.split()[0] for line in found] == ["0930", "09b0"]


@pytest.mark.parametrize(
    ("instructions", "num_found"),
    [
        (("ULDC.64 UR6, c[0x0][0x208]", "@P0 LDG.E.64 R14, desc[UR6][R18.64]"), 0),
        (("ULDC UR6, c[0x0][0x208]", "@!P0 LDG.E.64 R14, desc[UR6][R18.64]"), 1),
        (("S2UR UR5, SR_CgaCtaId", "UMOV UR4, 0x400", "ULEA UR4, UR5, UR4, 0x18", "STS [R2+UR4], R3"), 0),
        (("STS [R2+UR4], R3",), 1),
        (("ULDC.64 UR8, c[0x0][0x0]", "UIADD3.64 UR10, UR8, 0x2, URZ", "HGMMA.64x16x16.F32 R24, gdesc[UR8], R24"), 0),
        (("ULDC.64 UR8, c[0x0][0x0]", "HGMMA.64x16x16.F32 R24, gdesc[UR8], RZ, !UPT"), 1),
        (("ULDC.64 UR10, c[0x0][0x0]", "HGMMA.64x16x16.F32 R24, R4, gdesc[UR8], R24, gsb0"), 0),
        (("ULDC.64 UR8, c[0x0][0x0]", "HGMMA.64x16x16.F32 R24, R4, gdesc[UR8], R24, gsb0"), 1),
        (("R2UR UR4, R1", "UISETP.NE.AND UP0, UPT, UR4, URZ, UPT"), 0),
        (("UISETP.NE.AND UP0, UPT, UR4, URZ, UPT",), 1),
    ],
)
def test_registers_count_as_wide_as_they_are_used(instructions: tuple[str, ...], num_found: int) -> None:
    """A descriptor of memory is two registers; two of shared memory are four, of which one alone is the second half. A
    comparison writes none."""
    assert len(unwritten_reads(listing(*instructions))) == num_found


@pytest.mark.parametrize(
    ("instructions", "num_found"),
    [
        (("UMOV UR9, URZ", "UIADD3.X UR15, UR9, 0x40000040, URZ, UP3, !UPT"), 0),
        # Attention that loads its first tile before its loop, of heads of 128: UR4 was a place of the page table.
        (("R2UR UR4, R4", "UIADD3 UR34, UP2, UR4, 0x20, URZ", "UIADD3.X UR35, UR4, -0x3ffffff0, URZ, UP2, !UPT"), 1),
        (("UMOV UR9, URZ", "ULEA UR9, UR5, UR4, 0x18", "UIADD3.X UR51, UR9, -0x3ffffff0, URZ, UP0, !UPT"), 1),
        (("R2UR UR4, R4", "UIADD3.X UR5, UR4, 0x12345678, URZ, UP0, !UPT"), 0),
    ],
)
def test_a_descriptor_starts_from_nothing(instructions: tuple[str, ...], num_found: int) -> None:
    assert len(wrong_descriptors(listing(*instructions))) == num_found
