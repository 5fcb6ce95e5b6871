"""The window of vanilla MTP: TensorRT-LLM's cases for its update and prepare steps, and the worked trace of its worker.

The hidden state of a token is the token times ten here, so that a pair torn apart shows.
"""

from __future__ import annotations

import pytest
import torch

from spec_lab.drafters.mtp_window import MtpRows, MtpWindow, pair_with_next, slide, with_room

UPDATE = {
    "one prompt, K=1": ([[0]], [[5, 6, 7, 8, 9]], [5], [[9]]),
    "three prompts, K=2": (
        [[0, 0], [0, 0], [0, 0]],
        [[5, 6, 7, 8, 9, 0], [15, 16, 17, 18, 0, 0], [25, 26, 27, 28, 29, 30]],
        [5, 4, 6],
        [[8, 9], [17, 18], [29, 30]],
    ),
    "one round, K=1": ([[19]], [[20, 21]], [2], [[21]]),
    "four rounds, K=1": (
        [[1], [2], [3], [4]],
        [[11, 12], [21, 22], [31, 32], [41, 42]],
        [2, 1, 1, 2],
        [[12], [21], [31], [42]],
    ),
    "two prompts, K=2": ([[0, 0], [0, 0]], [[5, 6, 7], [8, 9, 0]], [3, 2], [[6, 7], [8, 9]]),
    "and two rounds, the last keeps an old row": (
        [[2, 2], [3, 3]],
        [[21, 22, 23], [31, 32, 33]],
        [3, 1],
        [[22, 23], [3, 31]],
    ),
    "a prompt of one token, K=3": ([[0, 0, 0]], [[7]], [1], [[0, 0, 7]]),
    "a prompt of two tokens, K=3": ([[0, 0, 0]], [[7, 8]], [2], [[0, 7, 8]]),
    "a padded row": ([[4, 5]], [[6, 7, 8]], [0], [[4, 5]]),
}
PREPARE = {
    "one prompt": ([[5, 6, 7, 8, 9]], [0], [[6, 7, 8, 9, 0]]),
    "three prompts": ([[5, 6, 7], [8, 9, 10], [1, 2, 3]], [50, 51, 52], [[6, 7, 50], [9, 10, 51], [2, 3, 52]]),
    "one round, K=1": ([[42]], [43], [[43]]),
    "three rounds, K=3": (
        [[19, 20, 21], [29, 30, 31], [39, 40, 41]],
        [22, 32, 42],
        [[20, 21, 22], [30, 31, 32], [40, 41, 42]],
    ),
}


def rows_of(tokens: list[list[int]]) -> MtpRows:
    ids = torch.tensor(tokens)
    return MtpRows(ids, torch.stack((ids, ids + 0.5), dim=2) * 10.0)


def same(rows: MtpRows, tokens: list[list[int]]) -> bool:
    expected = rows_of(tokens)
    return rows.tokens.tolist() == expected.tokens.tolist() and torch.equal(rows.hidden, expected.hidden)


@pytest.mark.parametrize("name", UPDATE)
def test_update_keeps_the_last_rows_that_count(name: str) -> None:
    window, inputs, num_valid, expected = UPDATE[name]
    old, new = rows_of(window), rows_of(inputs)
    updated = slide(old, new, torch.tensor(num_valid), len(window[0]))
    assert same(updated, expected)
    assert same(old, window) and same(new, inputs), "out of place"


@pytest.mark.parametrize("name", PREPARE)
def test_prepare_moves_tokens_and_not_hidden_states(name: str) -> None:
    window, newest, expected = PREPARE[name]
    rows = rows_of(window)
    prepared = pair_with_next(rows, torch.tensor(newest))
    assert prepared.tokens.tolist() == expected
    assert torch.equal(prepared.hidden, rows.hidden) and same(rows, window)


def test_a_wider_slide_ends_where_the_window_ends() -> None:
    """N rows: the window of K, and the row that has just left it."""
    window, inputs = rows_of([[1, 2, 3], [1, 2, 3]]), rows_of([[4, 5, 6, 7], [4, 5, 6, 7]])
    assert same(slide(window, inputs, torch.tensor([1, 4]), 4), [[1, 2, 3, 4], [4, 5, 6, 7]])


def letters(text: str) -> torch.Tensor:
    return torch.tensor([[ord(letter) for letter in text]])


def spell(rows: MtpRows) -> tuple[str, str]:
    tokens, hidden = (values[0].flatten().int().tolist() for values in (rows.tokens, rows.hidden))
    return "".join(map(chr, tokens)), "".join(map(chr, hidden))


def inputs_of(text: str) -> MtpRows:
    """The tokens of the target's forward; H_A is written A, a module's h_A a."""
    return MtpRows(letters(text), letters(text).unsqueeze(2).float())


def test_worked_trace() -> None:
    """TensorRT-LLM's `MTPWorker.forward`: prompt ABCD, three modules, then n = 3 and n = 1."""
    empty = inputs_of("\0\0\0")
    prompt = inputs_of("ABCD")
    window = slide(empty, prompt, torch.tensor([4]), 3)
    assert spell(pair_with_next(prompt, torch.tensor([ord("E")]))) == ("BCDE", "ABCD")

    window = slide(window, inputs_of("EFGH"), torch.tensor([3]), 3)
    first = pair_with_next(window, torch.tensor([ord("X")]))
    assert spell(first) == ("FGX", "EFG")
    rows = with_room(first, 2)
    rows.put(3, torch.tensor([ord("N")]), torch.tensor([[float(ord("x"))]]))
    rows.put(4, torch.tensor([ord("O")]), torch.tensor([[float(ord("n"))]]))
    last_three = [row[-3:] for row in spell(rows.first(4))], [row[-3:] for row in spell(rows)]
    assert last_three == (["GXN", "FGx"], ["XNO", "Gxn"])
    assert spell(first) == ("FGX", "EFG"), "with room is a copy"

    window = slide(window, inputs_of("XNOP"), torch.tensor([1]), 3)
    assert spell(pair_with_next(window, torch.tensor([ord("K")]))) == ("GXK", "FGX")


def test_slots_keep_their_windows() -> None:
    window = MtpWindow(num_slots=3, size=2, hidden_size=2, dtype=torch.float32, device=torch.device("cpu"))
    addresses = window.tokens.data_ptr(), window.hidden.data_ptr()
    window.tokens.fill_(-1)
    window.hidden.fill_(float("nan"))
    window.slide(torch.tensor([2, 0]), rows_of([[5, 6], [7, 8]]), torch.tensor([2, 2]))
    assert same(window.of(torch.tensor([0, 2])), [[7, 8], [5, 6]])
    assert window.tokens[[1, 3]].eq(-1).all() and window.hidden[[1, 3]].isnan().all()
    window.clear(1)
    assert window.tokens[1].eq(0).all() and window.hidden[1].eq(0).all()
    assert same(window.of(torch.tensor([2])), [[5, 6]])
    assert (window.tokens.data_ptr(), window.hidden.data_ptr()) == addresses
