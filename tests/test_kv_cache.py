"""Pages, page tables and cache slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_lab.core.kv_cache import NULL_PAGE, NUM_RESERVED_PAGES, SCRATCH_PAGE, cache_slots
from spec_lab.engine.pages import PageAllocator, PageTable

CPU = torch.device("cpu")


def make_table(num_slots: int = 2, max_seq_len: int = 10, page_size: int = 4) -> PageTable:
    return PageTable(num_slots, max_seq_len, page_size, CPU)


def test_a_position_lies_in_its_page_at_its_offset() -> None:
    table = make_table()
    table.assign(0, [5, 2, 9])
    positions = torch.arange(12).unsqueeze(0)
    slots = cache_slots(table.pages[:1], positions, 4)
    assert slots.tolist() == [[20, 21, 22, 23, 8, 9, 10, 11, 36, 37, 38, 39]]


def test_past_the_last_page_and_before_position_zero_lies_scratch() -> None:
    """Clamping the cache slot instead of sending the write to scratch would overwrite a live row."""
    table = make_table()
    table.assign(0, [5, 2])
    positions = torch.tensor([[-9, -4, -1, 7, 8, 11, 12, 400]])
    pages = cache_slots(table.pages[:1], positions, 4) // 4
    assert pages.tolist() == [[SCRATCH_PAGE] * 3 + [2] + [SCRATCH_PAGE] * 4]


def test_the_scratch_slot_of_padded_rows_has_no_other_page_than_scratch() -> None:
    table = make_table()
    for slot in range(2):
        table.assign(slot, [2 + slot])
    assert set(table.pages[table.scratch_slot].tolist()) == {SCRATCH_PAGE}
    with pytest.raises(AssertionError):
        table.assign(table.scratch_slot, [2])


def test_the_last_column_stays_scratch() -> None:
    table = make_table()
    table.assign(0, [5, 2, 9])
    assert table.pages[0].tolist() == [5, 2, 9, SCRATCH_PAGE]
    with pytest.raises(AssertionError):
        table.assign(0, [5, 2, 9, 3])
    table.assign(0, [7])
    assert table.pages[0].tolist() == [7] + [SCRATCH_PAGE] * 3
    table.clear(0)
    assert table.pages[0].tolist() == [SCRATCH_PAGE] * 4


@given(st.lists(st.integers(0, 6), max_size=30))
def test_the_allocator_gives_every_page_to_one_owner(sizes: list[int]) -> None:
    allocator = PageAllocator(NUM_RESERVED_PAGES + 12)
    held: list[list[int]] = []
    for size in sizes:
        if size > allocator.num_free:
            allocator.give_back(held.pop(0))
            continue
        held.append(allocator.take(size))
        taken = [page for pages in held for page in pages]
        assert len(set(taken)) == len(taken)
        assert not {NULL_PAGE, SCRATCH_PAGE} & set(taken)
        assert allocator.num_free == allocator.num_total - len(taken)
