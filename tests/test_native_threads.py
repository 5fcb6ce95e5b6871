"""Threads that share the work of kernels=native: no bit depends on how many there are, and one left alone goes on."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from spec_kernels.native import build
from spec_kernels.native.compiled import use_threads
from spec_kernels.native.part_operators import multiply
from spec_kernels.native.parts import NativeProduct
from spec_lab.operators.native_set import native_set
from tests.native_lane import FULL, Lane, tokens_of

pytestmark = pytest.mark.skipif(build.problem() is not None, reason="needs a C compiler")
OUTPUTS, INPUTS = 777, 130
"""Panels that no number of threads divides, the last one narrow, and enough of both to be shared."""


@pytest.fixture(autouse=True)
def one_thread_behind() -> Iterator[None]:
    yield
    use_threads(1)


def product_of(seed: int, num_rows: int, narrow: bool) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    weight = torch.randn(OUTPUTS, INPUTS, generator=drawn)
    product = NativeProduct(weight.bfloat16().float() if narrow else weight)
    out = torch.empty(num_rows, OUTPUTS)
    multiply(out, torch.randn(num_rows, INPUTS, generator=drawn), product.address)
    return out


@pytest.mark.parametrize("narrow", [False, True])
def test_a_product_has_the_bits_of_one_thread(narrow: bool) -> None:
    alone = [product_of(seed, num_rows, narrow) for seed, num_rows in enumerate((1, 3, 17))]
    for num_threads in (2, 3, 20, 2):
        use_threads(num_threads)
        for seed, num_rows in enumerate((1, 3, 17)):
            assert torch.equal(product_of(seed, num_rows, narrow), alone[seed])


def test_a_model_has_the_bits_of_one_thread() -> None:
    """Attention too: of a prompt, and of two requests of which one is longer."""
    found = []
    for num_threads in (1, 3):
        use_threads(num_threads)
        lane = Lane(FULL, native_set())
        outputs = lane.run([0], tokens_of(1, 20)), lane.run([20, 0], tokens_of(2, 6))
        found.append(torch.cat([output.hidden for output in outputs]))
    assert torch.equal(found[0], found[1])


def test_two_callers_at_once_have_one_team_between_them() -> None:
    alone = [product_of(seed, 4, False) for seed in range(8)]
    use_threads(2)
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lambda seed: product_of(seed % 8, 4, False), range(64)))
    assert all(torch.equal(rows, alone[place % 8]) for place, rows in enumerate(found))


def _in_a_child(sums: multiprocessing.SimpleQueue[float]) -> None:
    sums.put(float(product_of(1, 4, False).sum()))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_fork_goes_on_alone() -> None:
    use_threads(3)
    here = float(product_of(1, 4, False).sum())
    context = multiprocessing.get_context("fork")
    sums = context.SimpleQueue()
    child = context.Process(target=_in_a_child, args=(sums,))
    child.start()
    child.join(60)
    assert not child.is_alive() and child.exitcode == 0 and sums.get() == here
