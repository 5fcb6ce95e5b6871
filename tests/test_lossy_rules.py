"""The rules between strict and relaxed: each law against its formula written out, token by token, and by drawing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from spec_lab.acceptance.distribution import SamplingParams, probabilities
from spec_lab.acceptance.lossy import LossyAcceptance, Window
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.token_laws import (
    Cascade,
    Ensemble,
    Fuzzy,
    Mentored,
    OverlapLaw,
    Thresholds,
    TokenLaw,
    Typical,
    exact,
    jensen_shannon,
    reverse_kl,
    total_variation,
)
from spec_lab.core.types import Verification
from spec_lab.engine.readback import read_later
from tests.acceptance_cases import CPU, make_inputs, request
from tests.covering import each_value

Row = list[float]
Written = Callable[[Row, Row, int], tuple[float, Row]]
"""A law written out: from p, q and a draft, its chance to pass and the law of the token behind it if it fails."""

PLAIN = SamplingParams(temperature=1.0)
VOCAB = 5


def share(weights: Row, otherwise: Row) -> Row:
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0 else otherwise


def overlap(v: Row, p: Row, q: Row, x: int) -> tuple[float, Row]:
    passes = 0.0 if v[x] == 0 else min(1.0, v[x] / q[x])
    return passes, share([max(a - b, 0.0) for a, b in zip(v, q, strict=True)], p)


def entropy_of(p: Row) -> float:
    return -sum(a * math.log(a) for a in p if a > 0)


def kl(a: Row, b: Row) -> float:
    return sum(math.inf if y == 0 else x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)


def written_typical(epsilon: float, delta: float) -> Written:
    return lambda p, q, x: (float(p[x] > min(epsilon, delta * math.exp(-entropy_of(p)))), p)


def written_thresholds(single: float, acc: float) -> Written:
    def law(p: Row, q: Row, x: int) -> tuple[float, Row]:
        passes = 1.0 if p[x] >= single else min(1.0, p[x] / acc)
        return passes, share([0.0 if y == x else p[y] for y in range(len(p))], p)

    return law


def written_cascade(alpha: float) -> Written:
    def law(p: Row, q: Row, x: int) -> tuple[float, Row]:
        passes, behind = overlap(p, p, q, x)
        return (1.0 if p[x] >= (1 - alpha) * max(p) else passes), behind

    return law


def written_ensemble(weight: float) -> Written:
    return lambda p, q, x: overlap([weight * a + (1 - weight) * b for a, b in zip(p, q, strict=True)], p, q, x)


def written_fuzzy(kind: str, most: float) -> Written:
    def law(p: Row, q: Row, x: int) -> tuple[float, Row]:
        middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
        far = {
            "tv": sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
            "kl": kl(q, p),
            "js": (kl(p, middle) + kl(q, middle)) / 2,
        }[kind]
        return float(far <= most), p

    return law


SETTINGS: list[tuple[str, TokenLaw, Written]] = [
    *((f"typical-{e}-{d}", Typical(e, d), written_typical(e, d)) for e, d in [(0.3, 0.09), (0.1, 0.3), (0.9, 0.9)]),
    *(
        (f"thresholds-{s}-{a}", Thresholds(s, a), written_thresholds(s, a))
        for s, a in [(1.0, 1.0), (0.5, 1.0), (1.0, 0.4), (0.2, 0.7), (0.05, 0.9)]
    ),
    *((f"cascade-{a}", Cascade(a), written_cascade(a)) for a in [0.0, 0.3, 0.7, 0.95]),
    *((f"ensemble-{w}", OverlapLaw(Ensemble(w)), written_ensemble(w)) for w in [1.0, 0.8, 0.5, 0.1]),
    *(
        (f"fuzzy-{kind}-{most}", Fuzzy(divergence, most), written_fuzzy(kind, most))
        for kind, divergence in {"tv": total_variation, "kl": reverse_kl, "js": jensen_shannon}.items()
        for most in [0.0, 0.1, 0.3, 0.6]
    ),
    ("exact", OverlapLaw(exact), lambda p, q, x: overlap(p, p, q, x)),
    ("mentored-0", OverlapLaw(Mentored(0.0)), lambda p, q, x: overlap(p, p, q, x)),
]


def random_laws(seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs p, q [rows, vocab] in float64: far, near and equal ones, some with zeros, some one-hot."""
    generator = torch.Generator().manual_seed(seed)
    p, noise = torch.softmax(2 * torch.randn((2, rows, VOCAB), generator=generator, dtype=torch.float64), dim=-1)
    p[::3, 1] = 0
    p = p / p.sum(dim=-1, keepdim=True)
    q = torch.where((torch.arange(rows) % 2 == 0).unsqueeze(1), noise, 0.9 * p + 0.1 * noise)
    q[5::6] = p[5::6]
    q[4::6] = torch.nn.functional.one_hot(noise[4::6].argmax(dim=-1), VOCAB).double()
    return p, q


def emitted_by(written: Written, p: Row, q: Row) -> Row:
    """The law of the row's token, over every draft and either outcome of its test."""
    law = [0.0] * len(p)
    for x, drawn in enumerate(q):
        if drawn > 0:
            passes, behind = written(p, q, x)
            law[x] += drawn * passes
            law = [sofar + drawn * (1 - passes) * more for sofar, more in zip(law, behind, strict=True)]
    return law


def rule_of(
    law: TokenLaw, num_slots: int = 1, sampling: SamplingParams = PLAIN, window: Window | None = None
) -> LossyAcceptance:
    seeds = SlotSeeds(num_slots, 0, CPU)
    rule = LossyAcceptance(law, sampling, seeds, window)
    for slot in range(num_slots):
        rule.admit(slot, request(request_id=f"r{slot}"))
    return rule


@pytest.mark.parametrize(("name", "law", "written"), SETTINGS, ids=[name for name, *_ in SETTINGS])
def test_a_row_emits_what_the_formula_says(name: str, law: TokenLaw, written: Written) -> None:
    """The law that the price is reckoned from is that of the rule, over every draft, outcome and last token."""
    p, q = random_laws(1, 24)
    bonus = torch.zeros_like(p)
    inputs = make_inputs(torch.stack((p, bonus), dim=1).log(), [[0]] * 24, draft_logits=q.log().unsqueeze(1))
    rule = rule_of(law)
    emitted = rule.emitted_law(rule.judge(inputs), inputs)[:, 0]
    rows = zip(p.tolist(), q.tolist(), strict=True)
    expected = torch.tensor([emitted_by(written, a, b) for a, b in rows], dtype=torch.float64)
    torch.testing.assert_close(emitted, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(emitted.sum(dim=-1), torch.ones(24, dtype=torch.float64))


LOSSLESS = ["thresholds-1.0-1.0", "ensemble-1.0", "fuzzy-tv-0.0", "fuzzy-js-0.0", "exact", "mentored-0"]


@pytest.mark.parametrize("name", LOSSLESS)
def test_the_ends_of_the_scales_are_lossless(name: str) -> None:
    law = {key: law for key, law, _ in SETTINGS}[name]
    p, q = random_laws(2, 30)
    accepts = law.accepts(p, q)
    emitted = q * accepts + law.spread(p, q, q * (1 - accepts))
    torch.testing.assert_close(emitted, p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bound", [0.01, 0.1, 0.5, 3.0])
def test_mentored_uses_its_bound_and_no_law_within_it_accepts_more(bound: float) -> None:
    p, q = random_laws(3, 12)
    q = torch.where(p > 0, q, 0) + 1e-3 * p
    q = q / q.sum(dim=-1, keepdim=True)
    law = Mentored(bound)(p, q)
    divergence = reverse_kl(p, law)
    assert (divergence <= bound + 1e-9).all()
    wanted = reverse_kl(p, q).clamp(max=bound)
    torch.testing.assert_close(divergence, wanted, rtol=0, atol=1e-6)
    best = torch.minimum(law, q).sum(dim=-1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        # Mixtures of p, q and noise on the support of p, of which those within the bound may not do better.
        weights = torch.rand((3, 12, 1), generator=generator, dtype=torch.float64) ** 3
        noise = torch.where(p > 0, torch.rand(p.shape, generator=generator, dtype=torch.float64), 0)
        other = weights[0] * p + weights[1] * q + 0.2 * weights[2] * noise * p
        other = other / other.sum(dim=-1, keepdim=True)
        is_within = (reverse_kl(p, other) <= bound).squeeze(-1)
        assert (torch.minimum(other, q).sum(dim=-1) <= best + 1e-9)[is_within].all()


def test_mentored_keeps_its_bound_where_the_draft_is_next_to_impossible() -> None:
    """A probability too small to show in a sum near 1 is still what the bound is about."""
    unlikely = torch.tensor([1e-3, 1e-9, 1e-17, 1e-30]).unsqueeze(1)
    p = torch.cat((unlikely, 0.75 - unlikely, torch.full_like(unlikely, 0.25)), dim=1)
    q = torch.zeros_like(p)
    q[:, 0] = 1
    law = Mentored(0.1)(p, q)
    torch.testing.assert_close(
        reverse_kl(p.double(), law.double()), torch.full((4, 1), 0.1).double(), rtol=0, atol=1e-5
    )
    assert (law[:, 0] > 0).all()


def test_mentored_uses_its_bound_where_another_ratio_is_huge() -> None:
    """A token that the target all but excludes does not take the bound from the others."""
    p = torch.tensor([[1e-30, 0.9, 0.1]])
    q = torch.tensor([[1e-3, 0.099, 0.9]])
    law = Mentored(0.1)(p, q)
    torch.testing.assert_close(reverse_kl(p, law), torch.full((1, 1), 0.1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "greedy"),
    each_value(
        ["typical-0.3-0.09", "thresholds-0.2-0.7", "cascade-0.7", "ensemble-0.5", "fuzzy-js-0.1"], [False, True]
    ),
)
def test_drawn_tokens_follow_the_law(name: str, greedy: bool) -> None:
    """The whole rule with its real noise, 20 000 requests alike: the first token emitted, and the mean distance."""
    law, count = {key: law for key, law, _ in SETTINGS}[name], 20_000
    p, q = (rows[:2].float() for rows in random_laws(6, 24))
    generator = torch.Generator().manual_seed(1)
    drafts = torch.stack([row.multinomial(count, True, generator=generator) for row in q], dim=1)
    drafts = q.argmax(dim=-1).expand(count, -1).contiguous() if greedy else drafts
    logits = torch.cat((p, p[:1])).log().expand(count, -1, -1)
    inputs = make_inputs(logits, drafts, draft_logits=None if greedy else q.log().expand(count, -1, -1))
    rule = rule_of(law, count)
    verification = rule.accept(inputs)
    expected = rule.emitted_law(rule.judge(inputs), inputs)[0, 0].double()
    found = torch.bincount(verification.tokens[:, 0], minlength=VOCAB) / count
    assert (found - expected).abs().max() < 5 * math.sqrt(0.25 / count)
    reached_second = verification.num_emitted > 1
    second = torch.bincount(verification.tokens[reached_second, 1], minlength=VOCAB) / reached_second.sum().clamp(min=1)
    law_of_second = rule.emitted_law(rule.judge(inputs), inputs)[0, 1].double()
    if int(reached_second.sum()) > 1000:
        assert (second - law_of_second).abs().max() < 5 * math.sqrt(0.25 / int(reached_second.sum()))
    assert verification.distance is not None
    first = total_variation(expected, p[0].double()).item()
    other = total_variation(law_of_second, p[1].double()).item()
    torch.testing.assert_close(verification.distance[:, 0], first + other * reached_second.float(), rtol=0, atol=1e-5)


def fly_passes(passed: tuple[bool, ...], unsure: tuple[bool, ...], length: int) -> int:
    """FLy's walk, written out: how many drafts are accepted."""
    for index, is_passed in enumerate(passed):
        window = passed[index + 1 : index + 1 + length]
        if not is_passed and not (unsure[index] and len(window) == length and all(window)):
            return index
    return len(passed)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_failed_draft_is_forgiven_where_the_target_is_unsure_and_agrees_behind_it(length: int) -> None:
    """Every pattern of passed and failed drafts with every pattern of unsure rows, of four drafts at temperature 0."""
    cases = list(itertools.product(itertools.product([True, False], repeat=4), repeat=2))
    sure, unsure = [0.96, 0.01, 0.01, 0.01, 0.01], [0.4, 0.3, 0.28, 0.01, 0.01]
    rows = [[unsure if is_unsure else sure for is_unsure in (*pattern, False)] for _, pattern in cases]
    drafts = [[0 if is_passed else 1 for is_passed in passed] for passed, _ in cases]
    greedy = SamplingParams(temperature=0.0)
    rule = rule_of(OverlapLaw(exact), len(cases), greedy, Window(length, least_entropy=0.5, topk=3))
    verification = rule.accept(make_inputs(torch.tensor(rows).log(), drafts))
    expected = [fly_passes(passed, pattern, length) + 1 for passed, pattern in cases]
    assert verification.num_emitted.tolist() == expected
    lasts = verification.tokens.gather(1, verification.num_emitted.unsqueeze(1) - 1)
    assert set(lasts.flatten().tolist()) == {0}, "the last token is the target's own"


def test_a_window_does_not_reach_past_the_offered_drafts() -> None:
    unsure = [0.4, 0.3, 0.28, 0.01, 0.01]
    logits = torch.tensor([[unsure] * 4] * 4).log()
    rule = rule_of(OverlapLaw(exact), 4, SamplingParams(temperature=0.0), Window(1, 0.5, 3))
    inputs = make_inputs(logits, [[0, 1, 0]] * 4, num_drafts=torch.tensor([3, 2, 1, 0]))
    verification = rule.accept(inputs)
    assert verification.num_emitted.tolist() == [4, 2, 2, 1]
    assert verification.distance[:, 0].tolist() == [1, 0, 0, 0], "only what is forgiven costs something"


def test_a_window_behind_no_drafts_at_all() -> None:
    """As of a round in which a drafter that looks drafts up has found none."""
    rule = rule_of(OverlapLaw(exact), 2, SamplingParams(temperature=0.0), Window(2, 0.5, 3))
    verification = rule.accept(make_inputs(torch.eye(VOCAB)[:2].unsqueeze(1), [[], []]))
    assert verification.tokens.tolist() == [[0], [1]] and verification.num_emitted.tolist() == [1, 1]


@pytest.mark.parametrize(("name", "law", "written"), SETTINGS[::6], ids=[name for name, *_ in SETTINGS[::6]])
def test_what_is_not_offered_is_the_targets_own(name: str, law: TokenLaw, written: Written) -> None:
    """The last token of a request that offers nothing has the law of plain sampling, and costs nothing."""
    count = 4000
    p, q = (rows[:1].float() for rows in random_laws(6, 24))
    rule = rule_of(law, count)
    offers = torch.zeros(count, dtype=torch.int64)
    inputs = make_inputs(
        p.log().expand(count, 2, -1), [[0]] * count, draft_logits=q.log().expand(count, 1, -1), num_drafts=offers
    )
    verification = rule.accept(inputs)
    assert verification.num_emitted.tolist() == [1] * count and not verification.distance.any()
    found = torch.bincount(verification.tokens[:, 0], minlength=VOCAB) / count
    assert (found - p[0]).abs().max() < 5 * math.sqrt(0.25 / count)


def test_padded_rows_and_rounds_without_drafts() -> None:
    rule = rule_of(Typical(0.3, 0.09), 2)
    p = random_laws(7, 2)[0]
    plain = rule.accept(make_inputs(p.log().unsqueeze(1), torch.zeros((2, 0), dtype=torch.int64)))
    assert plain.num_emitted.tolist() == [1, 1] and not plain.distance.any()
    padded = make_inputs(p.log().unsqueeze(1).expand(2, 3, -1), [[0, 1], [1, 2]], active=torch.tensor([True, False]))
    verification = rule.accept(padded)
    assert verification.num_emitted[1] == 0 and not verification.distance[1].any()


def test_the_host_reads_the_distances_of_each_round_and_request() -> None:
    """Those of rounds that were launched together stand one after another; KL may be infinite."""
    distance = torch.tensor([[0.25, 1e-9], [0.0, math.inf], [0.5, 2.0], [1 / 3, 0.1]])
    relaxed, tokens = torch.tensor([[1], [0], [0], [1]]), torch.arange(8).view(4, 2)
    verification = Verification(tokens, torch.ones(4, dtype=torch.int64), relaxed, distance=distance)
    rounds = read_later(verification).read().split(2)
    assert [result.distance for result in rounds] == [distance[:2].double().tolist(), distance[2:].double().tolist()]
    assert [result.relaxed for result in rounds] == [[[1], [0]], [[0], [1]]]
    assert [result.tokens for result in rounds] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_at_temperature_0_the_ensemble_still_passes_a_miss_now_and_then() -> None:
    count = 4000
    rule = rule_of(OverlapLaw(Ensemble(0.75)), count, SamplingParams(temperature=0.0))
    logits = torch.tensor([[[2.0, 1.0, 0.0, 0.0, 0.0]] * 2]).expand(count, -1, -1)
    verification = rule.accept(make_inputs(logits, [[1]] * count))
    assert abs((verification.num_emitted == 2).float().mean().item() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / count)
    assert probabilities(logits[0], SamplingParams(0.0))[0].tolist() == [1, 0, 0, 0, 0]
