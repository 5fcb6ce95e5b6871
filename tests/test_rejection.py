"""Rejection sampling is lossless: by exact enumeration of its decisions, and by sampling with the real generator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from spec_kernels.noise_reference import Use, round_key
from spec_lab.acceptance.block import block_decision
from spec_lab.acceptance.distribution import SamplingParams, probabilities, total, truncate
from spec_lab.acceptance.draft_sampling import DraftLogits, sample_draft
from spec_lab.acceptance.emit import only_offered
from spec_lab.acceptance.noise import NoiseKey, SlotSeeds
from spec_lab.acceptance.rejection import METHODS, RejectionAcceptance, RejectionMethod, offered_proposal
from spec_lab.acceptance.tokenwise import clipped_ratio, residual, residual_after
from spec_lab.core.types import AcceptanceInputs
from tests.acceptance_cases import CPU, SAMPLING, TRUNCATED, first_token, make_inputs, rejection_rule, request
from tests.covering import each_value

PLAIN = SamplingParams(temperature=1.0)


# Exact enumeration: two rounds, every draft, every pattern of passed tests, every last token.


@dataclass(frozen=True, slots=True)
class Models:
    """The logits after every prefix, in float64: `target[d]` and `drafter[d]` are [vocab ** d, vocab]."""

    target: list[torch.Tensor]
    drafter: list[torch.Tensor]
    vocab_size: int
    num_drafts: int

    @property
    def longest(self) -> int:
        """Tokens that two rounds can emit."""
        return 2 * (self.num_drafts + 1)


def zeros(p: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Leave every second token out of the draft vocabulary."""
    q = torch.softmax(noise, dim=-1)
    q[..., ::2] = 0
    return q / q.sum(-1, keepdim=True)


def certain(p: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(noise.argmax(-1), p.shape[-1]).double()


def equal(p: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return p


def nearly_equal(p: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    q = p * (1 + 1e-7 * noise)
    return q / q.sum(-1, keepdim=True)


def far(p: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Make the drafter likeliest where the target is least."""
    q = (1 - p) ** 12
    return q / q.sum(-1, keepdim=True)


def other(p: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return torch.softmax(2 * noise, dim=-1)


PROPOSALS = {"zeros": zeros, "one_hot": certain, "q=p": equal, "q~p": nearly_equal, "far": far, "other": other}


def make_models(vocab_size: int, num_drafts: int, sampling: SamplingParams, proposal: str) -> Models:
    generator = torch.Generator().manual_seed(vocab_size * 10 + num_drafts)
    target, drafter = [], []
    for depth in range(2 * (num_drafts + 1)):
        shape = (vocab_size**depth, vocab_size)
        target.append(2 * torch.randn(shape, generator=generator, dtype=torch.float64))
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        q = PROPOSALS[proposal](probabilities(target[-1], sampling), noise)
        drafter.append(q.log())
    return Models(target, drafter, vocab_size, num_drafts)


def inputs_after(models: Models, depth: int) -> tuple[AcceptanceInputs, torch.Tensor, torch.Tensor]:
    """Make a row for every prefix of `depth` tokens and every draft; return the prefix of each row, and the draft's
    probability.
    """
    vocab_size, num_drafts = models.vocab_size, models.num_drafts
    drafts = torch.cartesian_prod(*[torch.arange(vocab_size)] * num_drafts).view(-1, num_drafts)
    prefixes = torch.arange(vocab_size**depth).repeat_interleave(len(drafts))
    drafts = drafts.repeat(vocab_size**depth, 1)
    contexts = [prefixes]
    for column in drafts.unbind(1):
        contexts.append(contexts[-1] * vocab_size + column)
    logits = torch.stack([models.target[depth + j][context] for j, context in enumerate(contexts)], dim=1)
    q_logits = torch.stack([models.drafter[depth + j][contexts[j]] for j in range(num_drafts)], dim=1)
    drawn = torch.softmax(q_logits, -1).gather(-1, drafts.unsqueeze(-1)).squeeze(-1).prod(dim=1)
    return make_inputs(logits, drafts, draft_logits=q_logits), prefixes, drawn


Cut = Callable[[AcceptanceInputs], torch.Tensor]
"""Says how many of its drafts each row offers, [rows]."""


def one_round(
    mass: list[torch.Tensor],
    models: Models,
    method: RejectionMethod,
    sampling: SamplingParams,
    cut: Cut | None = None,
) -> list[torch.Tensor]:
    """Go from the probability of every prefix, by length, to that of every prefix one round later."""
    after = [torch.zeros_like(m) for m in mass]
    for depth in (d for d, m in enumerate(mass) if m.any()):
        inputs, prefixes, drawn = inputs_after(models, depth)
        inputs.num_drafts = None if cut is None else cut(inputs)
        p, q = probabilities(inputs.logits, sampling), offered_proposal(method, inputs)
        decision = method.decide(p, q, inputs.draft_tokens)
        assert ((decision.thresholds >= 0) & (decision.thresholds <= 1)).all()
        chances = decision.thresholds * only_offered(
            torch.ones_like(decision.thresholds, dtype=torch.bool), inputs.num_drafts
        )
        for pattern in itertools.product([False, True], repeat=models.num_drafts):
            passed = torch.tensor(pattern).expand_as(chances)
            chance = torch.where(passed, chances, 1 - chances).prod(dim=1)
            num_accepted = method.num_accepted(passed)
            weights = residual_after(p, q, decision.scales, num_accepted)
            m = int(num_accepted[0])
            emitted_prefix = prefixes
            for column in inputs.draft_tokens[:, :m].unbind(1):
                emitted_prefix = emitted_prefix * models.vocab_size + column
            flow = (mass[depth][prefixes] * drawn * chance).unsqueeze(1) * weights / weights.sum(-1, keepdim=True)
            into = emitted_prefix.unsqueeze(1) * models.vocab_size + torch.arange(models.vocab_size)
            after[depth + m + 1].index_add_(0, into.flatten(), flow.flatten())
    return after


def continue_by_target(mass: list[torch.Tensor], models: Models, sampling: SamplingParams) -> torch.Tensor:
    """Continue every prefix by plain sampling to the greatest length: [vocab ** longest]."""
    joint = mass[0]
    for depth, logits in enumerate(models.target):
        joint = (joint.unsqueeze(1) * probabilities(logits, sampling)).flatten() + mass[depth + 1]
    return joint


def empty_prefix(models: Models) -> list[torch.Tensor]:
    mass = [torch.zeros(models.vocab_size**d, dtype=torch.float64) for d in range(models.longest + 1)]
    mass[0][0] = 1
    return mass


def enumeration_error(
    models: Models, method: RejectionMethod, sampling: SamplingParams, cut: Cut | None = None
) -> float:
    """The largest difference between the joint distribution after two rounds and the target's."""
    start = empty_prefix(models)
    mass = one_round(one_round(start, models, method, sampling, cut), models, method, sampling, cut)
    error = continue_by_target(mass, models, sampling) - continue_by_target(start, models, sampling)
    return error.abs().max().item()


ENUMERATED = {"plain": SAMPLING, "truncated": TRUNCATED}


@pytest.mark.parametrize("sampling", ENUMERATED)
@pytest.mark.parametrize("proposal", PROPOSALS)
@pytest.mark.parametrize("method", METHODS)
def test_two_rounds_equal_the_target(method: str, proposal: str, sampling: str) -> None:
    """The joint distribution of all six tokens is compared, over a vocabulary of 4; one_hot with drafts drawn from any
    q is lossless too.
    """
    models = make_models(4, 2, ENUMERATED[sampling], proposal)
    assert enumeration_error(models, METHODS[method], ENUMERATED[sampling]) < 1e-12


@pytest.mark.parametrize(
    ("method", "proposal", "vocab_size", "num_drafts"),
    [
        *((*row, 6, 2) for row in each_value(METHODS, PROPOSALS)),
        *((*row, 5, 3) for row in each_value(METHODS, ("q~p", "far", "other"))),
        *((method, "zeros", 6, 1) for method in METHODS),
    ],
)
def test_two_rounds_equal_the_target_in_all_sizes(method: str, proposal: str, vocab_size: int, num_drafts: int) -> None:
    models = make_models(vocab_size, num_drafts, TRUNCATED, proposal)
    assert enumeration_error(models, METHODS[method], TRUNCATED) < 1e-12


def expected_accepted(models: Models, method: RejectionMethod) -> float:
    after = one_round(empty_prefix(models), models, method, PLAIN)
    return sum((depth - 1) * m.sum().item() for depth, m in enumerate(after))


def test_expected_lengths_of_the_papers_example() -> None:
    """arXiv 2403.10444, section 2: 10/9 accepted tokens by token, 11/9 by block."""
    target = [torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).log().expand(2**d, 2) for d in range(6)]
    drafter = [torch.tensor([2 / 3, 1 / 3], dtype=torch.float64).log().expand(2**d, 2) for d in range(6)]
    models = Models(target, drafter, vocab_size=2, num_drafts=2)
    assert expected_accepted(models, METHODS["standard"]) == pytest.approx(10 / 9, abs=1e-12)
    assert expected_accepted(models, METHODS["block"]) == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize("proposal", PROPOSALS)
def test_block_never_accepts_less(proposal: str) -> None:
    models = make_models(4, 3, PLAIN, proposal)
    block, standard = (expected_accepted(models, METHODS[name]) for name in ("block", "standard"))
    assert block >= standard - 1e-12
    if proposal in ("zeros", "far", "other"):
        assert block > standard + 1e-3
    if proposal == "q=p":
        assert standard == pytest.approx(3, abs=1e-12)
        assert block == pytest.approx(3, abs=1e-12)


# Sampled: several rounds of many requests, with the real noise, against the exact distribution of the first tokens.


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of logits of the next token given the last one, [vocab, vocab]."""

    target: torch.Tensor
    drafter: torch.Tensor

    def joint(self, num_tokens: int, sampling: SamplingParams) -> torch.Tensor:
        """[vocab ** num_tokens] probabilities of the tokens after token 0."""
        p = probabilities(self.target.double(), sampling)
        joint = p[0]
        for _ in range(num_tokens - 1):
            joint = (joint.unsqueeze(1) * p.repeat(len(joint) // len(p), 1)).flatten()
        return joint


# A drafter that prefers what the target does not, found by a search for pairs on which wrong noise shows: with either
# of the wrong keys below the total variation is about .06.
TARGET = torch.tensor([[0.35, 0.35, 0.30], [0.20, 0.25, 0.55], [0.15, 0.10, 0.75]])
DRAFTER = torch.tensor([[0.05, 0.75, 0.20], [0.30, 0.30, 0.40], [0.35, 0.55, 0.10]])
CHAIN = Chain(TARGET.log(), DRAFTER.log())


def sampled_tokens(
    chain: Chain, rule: RejectionAcceptance, num_requests: int, num_rounds: int, num_drafts: int
) -> torch.Tensor:
    """Sample [num_requests, num_rounds * N] tokens emitted after token 0, valid up to the number of rounds at least."""
    tokens = torch.zeros(num_requests, num_rounds * (num_drafts + 1) + 1, dtype=torch.int64)
    slot_ids, kv_lens = torch.arange(num_requests), torch.full((num_requests,), 5)
    pending, written = torch.zeros_like(slot_ids), torch.zeros_like(slot_ids)
    buffer = DraftLogits(num_requests, num_drafts, chain.target.shape[0], CPU)
    for _ in range(num_rounds):
        drafts = [pending]
        for step in range(num_drafts):
            token, q_logits = sample_draft(chain.drafter[drafts[-1]], 0.8, slot_ids, kv_lens, step)
            buffer.write_rows(slot_ids, torch.tensor([step]), q_logits.unsqueeze(1))
            drafts.append(token)
        inputs = torch.stack(drafts, dim=1)
        verification = rule.accept(
            make_inputs(chain.target[inputs], inputs[:, 1:], kv_lens=kv_lens, draft_logits=buffer.of(slot_ids))
        )
        num_emitted = verification.num_emitted
        columns = written.unsqueeze(1) + torch.arange(num_drafts + 1)
        tokens.scatter_(1, columns, verification.tokens)
        pending = verification.tokens.gather(1, num_emitted.unsqueeze(1) - 1).squeeze(1)
        kv_lens, written = kv_lens + num_emitted, written + num_emitted
    return tokens


def total_variation(tokens: torch.Tensor, joint: torch.Tensor, vocab_size: int) -> float:
    """The total variation between the rows of `tokens` and `joint`, over sequences of that length."""
    code = torch.zeros_like(tokens[:, 0])
    for column in tokens.unbind(1):
        code = code * vocab_size + column
    measured = code.bincount(minlength=joint.numel()).double() / code.numel()
    return 0.5 * (measured - joint).abs().sum().item()


def variation_bound(joint: torch.Tensor, num_samples: int, failure: float = 1e-9) -> float:
    """What the total variation of a right sampler exceeds with probability `failure` at most.

    Its mean is at most half the sum of the standard deviations, and one sample moves it by 1/n at most (McDiarmid).
    """
    mean = 0.5 * (joint * (1 - joint) / num_samples).sqrt().sum().item()
    return mean + math.sqrt(math.log(1 / failure) / (2 * num_samples))


def variation_over_bound(
    method: str, sampling: SamplingParams, key: NoiseKey = round_key, num_requests: int = 100_000
) -> float:
    """The total variation of the first four tokens after four rounds of three drafts, over its bound."""
    num_rounds = 4
    seeds = SlotSeeds(num_requests, 0, CPU)
    seeds.values[:-1] = torch.arange(num_requests)  # neighbouring seeds, the hardest for a hash
    rule = RejectionAcceptance(METHODS[method], sampling, seeds, key)
    tokens = sampled_tokens(CHAIN, rule, num_requests, num_rounds, num_drafts=3)
    joint = CHAIN.joint(num_rounds, sampling)
    assert joint.sum().item() == pytest.approx(1)
    variation = total_variation(tokens[:, :num_rounds], joint, TARGET.shape[0])
    return variation / variation_bound(joint, num_requests)


TOP_2 = SamplingParams(0.8, top_k=2)


@pytest.mark.parametrize(
    ("method", "sampling"), [("block", PLAIN), ("block", TOP_2), ("standard", PLAIN), ("one_hot", TOP_2)]
)
def test_four_sampled_rounds_follow_the_target(method: str, sampling: SamplingParams) -> None:
    assert variation_over_bound(method, sampling) < 1


def test_first_token_is_plain_sampling() -> None:
    count, sampling = 1500, SamplingParams(1.0, top_k=3)
    logits = torch.tensor([[1.0, 0.0, -1.0, 0.5, -2.0]])
    rule = rejection_rule(1, "standard", sampling)
    tokens = []
    for index in range(count):
        rule.admit(0, request(request_id=str(index)))
        tokens.append(first_token(rule, logits, 0, 9))
    joint = probabilities(logits.double(), sampling)[0]
    assert total_variation(torch.stack(tokens), joint, 5) < variation_bound(joint, count)


def test_first_token_and_first_round_draw_apart() -> None:
    """The prompt pass and the first round have the same L."""
    count = 300
    rule = rejection_rule(1, "one_hot", PLAIN)
    logits = torch.zeros(1, 8)
    same = 0
    for index in range(count):
        rule.admit(0, request(request_id=str(index)))
        first = first_token(rule, logits, 0, 9)
        rejected = rule.accept(make_inputs(logits.view(1, 1, 8), [[]], kv_lens=torch.tensor([9])))
        same += int(first.item() == rejected.tokens[0, 0].item())
    assert abs(same / count - 1 / 8) < 5 * math.sqrt(1 / 8 * 7 / 8 / count)


# The distribution itself.


def test_top_k_keeps_exactly_k_and_the_lowest_ids() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 3.0]])
    assert truncate(logits, 3, None).isfinite().tolist() == [[True, True, False, False, True]]
    assert truncate(logits, 5, None) is logits
    assert truncate(torch.zeros(1, 40_000), 7, None).isfinite().nonzero()[:, 1].tolist() == list(range(7))


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1.0, 1e30, 1e300])
@pytest.mark.parametrize("top_p", [None, 5e-324, 1e-300, 1e-6, 1.0])
def test_probabilities_of_extreme_knobs_are_probabilities(temperature: float, top_p: float | None) -> None:
    logits = torch.tensor([[3.0, -1e4, 2.999, 1e4, 0.0]])
    found = probabilities(logits, SamplingParams(temperature, None, top_p))
    assert found.isfinite().all() and float(found.sum()) == pytest.approx(1)
    if temperature <= 1e-3 or (top_p is not None and top_p <= 1e-6):
        kept = found[0].nonzero()[:, 0].tolist()
        assert kept[0] == 0 if temperature > 1e30 else kept == [3]


def test_top_p_keeps_the_smallest_set() -> None:
    logits = torch.tensor([[0.125, 0.5, 0.25, 0.125]]).log()
    for top_p, kept in ((0.1, [1]), (0.5, [1]), (0.51, [1, 2]), (0.75, [1, 2]), (0.76, [0, 1, 2]), (1.0, [0, 1, 2, 3])):
        assert truncate(logits, None, top_p).isfinite()[0].nonzero()[:, 0].tolist() == kept, top_p


def test_top_p_comes_after_top_k() -> None:
    """.5 of what top-k leaves is one token; .5 of everything would be two."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert probabilities(logits, SamplingParams(1.0, top_k=2, top_p=0.5)).tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert probabilities(logits, SamplingParams(1.0, top_p=0.5))[0].count_nonzero() == 2


def test_temperature() -> None:
    logits = torch.tensor([[2.0, 0.0, 2.0]], dtype=torch.bfloat16)
    assert probabilities(logits, SamplingParams(0.0)).tolist() == [[1.0, 0.0, 0.0]]
    warm = probabilities(logits, SamplingParams(2.0))
    assert warm.dtype == torch.float32
    assert (warm[0, 0] / warm[0, 1]).item() == pytest.approx(math.e, rel=1e-5)


def test_total_is_exact_whatever_the_batch() -> None:
    """Rows summed alone, together and backwards agree to the last bit."""
    values = torch.rand(7, 100_003, generator=torch.Generator().manual_seed(0)) / 100_003
    together = total(values)
    assert torch.equal(together, torch.cat([total(row.unsqueeze(0)) for row in values]))
    assert torch.equal(together, total(values.flip(1)))
    assert together.tolist() == pytest.approx(values.double().sum(1).tolist(), abs=1e-10)


def test_zero_residual_mass_falls_back_to_the_target() -> None:
    p = torch.tensor([[0.25, 0.75], [0.25, 0.75], [0.5, 0.5]])
    q = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.0, 0.0]])
    weights = residual(p, q, torch.tensor([1.0, 1.0, 0.5]))
    assert weights.tolist() == [[0.25, 0.75], [0.0, 0.25], [0.25, 0.25]]


def test_clipped_ratio() -> None:
    """A draft that neither the target nor q could produce is rejected, not divided by zero."""
    ratio = clipped_ratio(torch.tensor([0.0, 0.0, 0.5, 0.2, 0.4]), torch.tensor([0.0, 0.5, 0.0, 0.4, 0.4]))
    assert ratio.tolist() == [0.0, 0.0, 1.0, 0.5, 1.0]


def test_block_thresholds_do_not_depend_on_the_order_of_the_sum() -> None:
    """They are the same to the last bit when the vocabulary is shuffled."""
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(torch.randn(3, 5, 2000, generator=generator), dim=-1)
    q = torch.softmax(p[:, :-1].log() + 0.1 * torch.randn(3, 4, 2000, generator=generator), dim=-1)
    drafts = q.argmax(dim=-1)
    shuffle = torch.randperm(2000, generator=generator)
    shuffled = block_decision(p[..., shuffle], q[..., shuffle], shuffle.argsort()[drafts])
    assert torch.equal(shuffled.thresholds, block_decision(p, q, drafts).thresholds)


@pytest.mark.parametrize("method", METHODS)
def test_every_draw_has_a_key_of_its_own(method: str) -> None:
    """Tests and last token take one draw a row each, at L, and none under the key of a proposal."""
    drawn: list[tuple[int, int, Use]] = []

    def key(seeds: torch.Tensor, kv_lens: torch.Tensor, rows: torch.Tensor | int, use: Use) -> torch.Tensor:
        drawn.extend((int(kv_lens), int(row), use) for row in torch.as_tensor(rows).flatten())
        return round_key(seeds, kv_lens, rows, use)

    rule = RejectionAcceptance(METHODS[method], PLAIN, SlotSeeds(1, 0, CPU), key)
    logits = torch.tensor([[[0.0, 9.0], [0.0, 9.0], [0.0, 9.0]]])
    rule.accept(make_inputs(logits, [[1, 1]], draft_logits=logits[:, :2], kv_lens=torch.tensor([7])))
    assert drawn == [(7, 0, Use.ACCEPT), (7, 1, Use.ACCEPT), (7, 2, Use.EMIT)]


def test_drafts_follow_the_drafter() -> None:
    """They stay within the draft vocabulary, at the draft's own temperature, each step with noise of its own."""
    count, temperature = 20_000, 0.5
    logits = torch.tensor([1.0, -math.inf, 0.0, 0.5]).expand(count, -1)
    seeds, kv_lens = torch.arange(count), torch.full((count,), 4)
    draws = [sample_draft(logits, temperature, seeds, kv_lens, step) for step in range(2)]
    joint = torch.softmax(logits[0].double() / temperature, dim=-1)
    assert torch.allclose(torch.softmax(draws[0][1], -1), joint.float().expand(count, -1))
    tokens = torch.stack([token for token, _ in draws], dim=1)
    pair = (joint.unsqueeze(1) * joint).flatten()
    assert total_variation(tokens, pair, 4) < variation_bound(pair, count)
    again, _ = sample_draft(logits, temperature, seeds, kv_lens, torch.tensor([1]))
    assert torch.equal(again, tokens[:, 1])


def test_draft_logits_are_kept_by_slot_and_step() -> None:
    """A tensor step writes them for two requests; they are read in another order, with a third one that came in."""
    buffer = DraftLogits(num_slots=4, num_draft_tokens=2, vocab_size=3, device=CPU)
    rows = torch.arange(12.0).view(2, 2, 3)
    for step in range(2):
        buffer.write_rows(torch.tensor([3, 1]), torch.tensor([step]), rows[:, step : step + 1])
    assert torch.equal(buffer.of(torch.tensor([1, 0, 3])), torch.stack([rows[1], torch.zeros(2, 3), rows[0]]))
