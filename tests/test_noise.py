"""The counter-based noise: known values, coarse uniformity and independence, the law of the race."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from spec_kernels.noise_reference import Use, child, race, round_key, uniform
from spec_lab.acceptance.noise import SlotSeeds, request_seed
from tests.acceptance_cases import CPU, request


def fits(counts: torch.Tensor, expected: torch.Tensor, log_failure: float = 14.0) -> bool:
    """Whether a chi-square statistic is neither too large nor too small, but for a chance of e^-14 on each side.

    Bounds of Laurent and Massart (2000) for k degrees of freedom: k + 2 sqrt(k x) + 2 x and k - 2 sqrt(k x).
    """
    freedom = counts.numel() - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    spread = 2 * math.sqrt(freedom * log_failure)
    return freedom - spread < statistic < freedom + spread + 2 * log_failure


def test_splitmix64_known_values() -> None:
    """The first five values of splitmix64 from the seed 1234567, as published with its reference code."""
    values = child(torch.tensor([1234567]), torch.arange(5))
    assert [value % 2**64 for value in values.tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert child(torch.tensor([1234567]), 4).tolist() == values[-1:].tolist()


def keys_along(axis: str, count: int) -> torch.Tensor:
    """Make keys that differ in one part only, by steps of one."""
    steps = torch.arange(count)
    fixed = torch.full((count,), 3)
    parts = {"seed": fixed, "length": fixed, "row": fixed, axis: steps}
    return round_key(parts["seed"], parts["length"], parts["row"], Use.ACCEPT)


@pytest.mark.parametrize("axis", ["seed", "length", "row"])
def test_uniform_along_every_part_of_the_key(axis: str) -> None:
    draws = uniform(keys_along(axis, 64_000))
    assert draws.dtype == torch.float64
    assert draws.min() > 0
    assert draws.max() < 1
    assert fits(torch.histc(draws, 64, 0, 1), torch.full((64,), 1000.0))
    pairs = (draws[:-1] * 8).long() * 8 + (draws[1:] * 8).long()
    expected = torch.full((64,), (draws.numel() - 1) / 64)
    assert fits(pairs.bincount(minlength=64).float(), expected)


def test_the_parts_of_a_key_are_not_interchangeable() -> None:
    """All keys of a grid differ, and draws of different uses or of swapped parts are uncorrelated."""
    seeds, lengths, rows = torch.meshgrid(*(torch.arange(16),) * 3, indexing="ij")
    keys = torch.stack([round_key(seeds, lengths, rows, use) for use in Use])
    assert keys.unique().numel() == len(Use) * 16**3
    draws = [uniform(key).flatten() for key in keys] + [uniform(round_key(lengths, rows, seeds, Use.DRAFT)).flatten()]
    correlations = torch.corrcoef(torch.stack(draws)).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / math.sqrt(16**3)


def test_extreme_keys_stay_inside_the_open_interval() -> None:
    lowest, highest = uniform(torch.tensor([0, -1])).tolist()
    assert lowest == 2**-53
    assert highest == 1 - 2**-53
    extremes = torch.tensor([-(2**63), 2**63 - 1, -1, 0, 1])
    assert uniform(round_key(extremes, extremes, 0, Use.EMIT)).unique().numel() == 5


@pytest.mark.parametrize("weights", [[0.5, 0.25, 0.25, 0.0], [1.0, 2.0, 3.0, 4.0], [1e-30, 0.0, 3e-30, 6e-30]])
def test_race_follows_the_weights(weights: list[float]) -> None:
    """It does where they are far from one in sum, too; a weight of zero never wins."""
    count = 40_000
    keys = round_key(torch.arange(count), torch.full((count,), 7), 0, Use.EMIT)
    expected = torch.tensor(weights, dtype=torch.float64)
    wins = race(expected.float().expand(count, -1), keys).bincount(minlength=4)
    assert wins[expected == 0].sum() == 0
    expected = expected[expected > 0] / expected.sum() * count
    assert fits(wins[torch.tensor(weights) > 0].double(), expected)


def test_races_with_neighbouring_keys_are_independent() -> None:
    """Vocabulary index i of one key must not be index i + 1 of the next."""
    count, vocab_size = 30_000, 5
    keys = round_key(torch.full((count,), 1), torch.arange(count), 0, Use.DRAFT)
    winners = race(torch.ones(count, vocab_size), keys)
    pairs = (winners[:-1] * vocab_size + winners[1:]).bincount(minlength=vocab_size**2).float()
    assert fits(pairs, torch.full((vocab_size**2,), (count - 1) / vocab_size**2))


def test_request_seed_follows_the_id_and_the_run() -> None:
    assert request_seed(0, "a") == request_seed(0, "a")
    seeds = {request_seed(run, name) for run in range(20) for name in ("a", "b", "1a", "")}
    assert len(seeds) == 80
    assert any(seed < 0 for seed in seeds)
    assert any(seed > 2**62 for seed in seeds)


def test_slot_seeds_follow_the_request() -> None:
    seeds = SlotSeeds(3, 9, CPU)
    seeds.admit(2, request(request_id="a"))
    seeds.admit(0, request(request_id="b"))
    assert seeds.of(torch.tensor([2, 0, 3])).tolist() == [request_seed(9, "a"), request_seed(9, "b"), 0]
    seeds.admit(2, request(request_id="c"))
    assert seeds.of(torch.tensor([2])).tolist() == [request_seed(9, "c")]


@pytest.mark.gpu
def test_same_bits_on_the_gpu() -> None:
    seeds, lengths = torch.arange(-500, 500), torch.arange(1000) * 7
    here = round_key(seeds.unsqueeze(1), lengths.unsqueeze(1), torch.arange(4), Use.ACCEPT)
    there = round_key(seeds.cuda().unsqueeze(1), lengths.cuda().unsqueeze(1), torch.arange(4).cuda(), Use.ACCEPT)
    assert torch.equal(there.cpu(), here)
    assert torch.equal(uniform(there).cpu(), uniform(here))
    weights = torch.rand(1000, 300)
    assert torch.equal(race(weights.cuda(), there[:, 0]).cpu(), race(weights, here[:, 0]))


def test_the_torch_form_needs_no_triton() -> None:
    """The lab draws its noise from it where there is no triton to import."""
    code = "import sys; sys.modules['triton'] = None; import spec_kernels.noise_reference"
    subprocess.run([sys.executable, "-c", code], check=True)
