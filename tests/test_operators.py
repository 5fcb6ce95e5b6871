"""Every function that a kernel may replace, against its torch form, in each set that replaces it.

Triton's run on a GPU where there is one, else in the interpreter; C's on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_kernels.native import build
from spec_kernels.noise_reference import round_key
from spec_kernels.tree_reference import (
    choose_branches_reference,
    choose_rows_reference,
    move_path_reference,
    rank_tokens_reference,
)
from spec_kernels.vocabulary import RACE_TILE, VOCAB_TILE
from spec_lab.acceptance.confidences import note_confidence
from spec_lab.acceptance.distribution import SamplingParams, truncated
from spec_lab.acceptance.draft_sampling import sample_and_keep
from spec_lab.acceptance.rejection import METHODS, rejection_sample
from spec_lab.acceptance.standing import stand
from spec_lab.acceptance.strict import strict_accept
from spec_lab.acceptance.synthetic import synthetic_accept
from spec_lab.acceptance.tree import draw_tree, follow_tree, impose_path
from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.core.kernel_set import Op
from spec_lab.core.types import RoundBatch, Verification, VerifiedRound
from spec_lab.drafters.catchup import plan_catchup
from spec_lab.drafters.mtp_window import slide_windows
from spec_lab.drafters.ngram import extend_and_look_up
from spec_lab.engine.graphs.draft_loops import carry_every_tensor
from spec_lab.engine.offered import count_offered
from spec_lab.engine.slots import commit_rows
from spec_lab.engine.stops import going_on
from spec_lab.engine.tape import TapeRecorder
from spec_lab.operators.native_set import NATIVE_FUNCTIONS, native_set
from spec_lab.operators.triton_set import TRITON_FUNCTIONS, triton_set
from tests.kernel_lab import DEVICE, DTYPES, TOLERANCE, randn
from tests.op_trees import draw_trees, likely_drafts

CPU = torch.device("cpu")
SETS: Mapping[str, Mapping[Op, Callable[..., Any]]] = {"triton": TRITON_FUNCTIONS, "native": NATIVE_FUNCTIONS}
NUM_SLOTS = 11
Given = tuple[Any, ...]


@dataclass(frozen=True)
class Form:
    """A torch form, and what it is given: each call of `cases` makes the same tensors anew.

    Attributes:
        emits: it returns tokens, how many of them count, and more: what stands behind those is junk.
    """

    function: Callable[..., Any]
    cases: Callable[[], Iterable[Given]]
    emits: bool = False


def integers(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random integers below `high`, the same on every device."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def arange(count: int) -> torch.Tensor:
    return torch.arange(count, device=DEVICE)


def ragged_logits(batch: int, num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits rounded so that maxima tie, as a view with strides of its own."""
    whole = (randn(batch + 1, num_rows + 1, vocab_size + 5) * 2).round().to(dtype)
    return whole[1:, 1:, :vocab_size]


def right_drafts(logits: torch.Tensor) -> torch.Tensor:
    """Drafts of which request 0 has all right, and request i the first i - 1, as a view of wider rows."""
    best = logits.float().argmax(dim=-1)
    for request in range(1, best.shape[0]):
        best[request, request - 1 :] = (best[request, request - 1 :] + 1) % logits.shape[-1]
    return best[:, :-1]


def places(batch: int, step: int = 31) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots in no order, the seeds of all slots, and lengths."""
    return (arange(batch) * 4 + 3) % NUM_SLOTS, (arange(NUM_SLOTS + 1) - 4) * 987654321987, arange(batch) * step + 5


def verdicts() -> Iterator[Given]:
    """No drafts, ragged ones, a vocabulary of one token more than a tile; all drafts offered, and some."""
    for place, (batch, num_rows, vocab_size) in enumerate([(1, 1, 5), (5, 4, 19), (2, 2, VOCAB_TILE + 1)]):
        logits = ragged_logits(batch, num_rows, vocab_size, DTYPES[place % len(DTYPES)])
        for num_drafts in (None, arange(batch) % num_rows)[: 1 + place % 2]:
            yield logits, right_drafts(logits), arange(batch) != 2, num_drafts


def standings() -> Iterator[Given]:
    for logits, drafts, *_ in verdicts():
        drafts[:, 1::2] = integers(0, logits.shape[2], *drafts.shape)[:, 1::2]
        yield logits, drafts


def rates(count: int) -> torch.Tensor:
    return torch.tensor([0.9, 0.6, 0.2, 0.1][:count], dtype=torch.float64, device=DEVICE)


def imposed() -> Iterator[Given]:
    """Rates reach further than the drafts do."""
    for batch, num_drafts, vocab_size in [(2, 0, 9), (7, 3, 40), (1, 1, 2 * VOCAB_TILE + 7)]:
        logits = ragged_logits(batch, num_drafts + 1, vocab_size)
        drafts, active = integers(0, vocab_size, batch, num_drafts + 1)[:, 1:], arange(batch) != 1
        for num_offered in (None, arange(batch) % (num_drafts + 1)):
            yield logits, drafts, rates(4), active, *places(batch), num_offered


def sampled() -> Iterator[Given]:
    """Drafts of a drafter that resembles the target, without a third of the vocabulary; greedy, top-k and top-p."""
    for place, (batch, num_rows, vocab_size) in enumerate([(3, 4, 130), (2, 1, 50), (1, 3, VOCAB_TILE + 257)]):
        whole = randn(batch, num_rows + 1, vocab_size + 3, dtype=DTYPES[place % len(DTYPES)]) * 3
        logits = whole[:, 1:, :vocab_size]
        draft_logits = 1.2 * logits[:, :-1].float() + 0.4 * randn(batch, num_rows - 1, vocab_size, seed=3)
        draft_logits[..., 2::3] = float("-inf")
        of_drafts = draft_logits.softmax(dim=-1).flatten(0, 1).cpu()
        drawn = torch.multinomial(of_drafts, 1, generator=torch.Generator().manual_seed(4)).view(batch, -1)
        drafts, active = drawn.to(DEVICE), arange(batch) != 1
        for step, sampling in enumerate(
            [SamplingParams(0.8), SamplingParams(0.0), SamplingParams(0.7, top_k=9), SamplingParams(1.3, 30, 0.8)]
        ):
            scaled, temperature = truncated(logits, sampling)
            num_drafts = None if step % 2 else (arange(batch) + step) % num_rows
            q = draft_logits if (step + place) % 3 else None
            yield scaled, drafts, q, active, *places(batch, step * 7 + 1), temperature, num_drafts


def drawn() -> Iterator[Given]:
    """One row of logits a request, a third of which no drafter has; each column in turn."""
    for batch, num_drafts, vocab_size in [(3, 2, 130), (1, 1, VOCAB_TILE + RACE_TILE + 1)]:
        for column in range(num_drafts):
            logits = randn(batch, vocab_size + 1, seed=column, dtype=DTYPES[batch % len(DTYPES)])[:, 1:] * 3
            logits[:, 2::3] = float("-inf")
            kept = torch.full((NUM_SLOTS + 1, num_drafts, vocab_size), float("nan"), device=DEVICE)
            yield kept, logits, *places(batch), torch.tensor([column], device=DEVICE), 0.3


def notes() -> Iterator[Given]:
    """A first draft and a later one; a slot for each request, the scratch slot last."""
    for column in (None, torch.tensor([2], device=DEVICE)):
        survival, running = products(NUM_SLOTS + 1, 3, seed=1), products(NUM_SLOTS + 1, seed=2)
        slot_ids = torch.cat((places(5)[0], torch.tensor([NUM_SLOTS], device=DEVICE)))
        yield survival, running, slot_ids, products(6, seed=3), column


def products(*shape: int, seed: int) -> torch.Tensor:
    """Probabilities of which many are equal, and products of them too."""
    return 0.5 ** integers(0, 4, *shape, seed=seed).float()


def offers() -> Iterator[Given]:
    """Fewer drafts than there is room for, smaller limits of requests, inactive rows in between."""
    for batch, num_drafts, most in [(1, 5, 5), (7, 3, 3), (3, 3, 0), (33, 5, 2)]:
        slot_ids = arange(batch) * 4 % (batch + 1)
        num_drafted, limits = (integers(0, num_drafts + 1, batch + 2, seed=seed) for seed in (most, batch))
        yield slot_ids, arange(batch) % 3 != 1, num_drafted, limits, most


def emitted_rounds() -> Iterator[tuple[torch.Tensor, ...]]:
    """Tokens [batch, N], how many of them count, and slots."""
    for batch, num_rows in [(1, 1), (6, 4), (5, 7)]:
        yield integers(0, 12, batch, num_rows), integers(0, num_rows + 1, batch, seed=1), places(batch)[0]


def committed() -> Iterator[Given]:
    for tokens, num_emitted, slot_ids in emitted_rounds():
        kv_lens, input_ids = arange(NUM_SLOTS + 1) * 5, integers(0, 9, NUM_SLOTS + 1, tokens.shape[1] + 1)
        drafts = integers(0, 9, len(tokens), tokens.shape[1] + 2)[:, 2:]
        yield kv_lens, input_ids[:, 1:].clone(), slot_ids, tokens, num_emitted, drafts[:, 1:]


def caught_up() -> Iterator[Given]:
    """Lengths at the ends of pages and of the table."""
    for batch, num_rows, first in [(1, 1, 0), (6, 4, 0), (6, 3, 2)]:
        kv_lens, num_emitted = integers(0, 30, batch), integers(0, num_rows + 1, batch, seed=1)
        yield kv_lens, num_emitted, integers(0, 40, batch, 9), first, num_rows, 4, 30


def ending() -> Iterator[Given]:
    """Tokens of a small vocabulary, lengths about the limits, rows that emitted nothing, no ends and several."""
    for (tokens, num_emitted, slot_ids), ends in zip(emitted_rounds(), ([], [3, 5, 0], list(range(9))), strict=True):
        kv_lens, end_lens, heeds_eos = (
            integers(low, high, NUM_SLOTS + 1, seed=low) for low, high in ((3, 9), (6, 14), (0, 2))
        )
        slot_ids[-1] = NUM_SLOTS
        eos = torch.tensor(ends, dtype=torch.int64, device=DEVICE)
        for only_last in (False, True):
            yield slot_ids, tokens, num_emitted, kv_lens, end_lens, heeds_eos, eos, only_last


@dataclass(slots=True)
class Handed:
    """A state of which a step replaces tokens [batch] and hidden [batch, hidden_size]."""

    tokens: torch.Tensor
    hidden: torch.Tensor


def handed() -> Iterator[Given]:
    """Steps that are not the last one, whose results nobody reads."""
    for (batch, num_drafts, hidden_size), dtype in zip([(1, 2, 16), (5, 4, 1100)], DTYPES, strict=False):
        drafts = torch.full((batch, num_drafts + 2), -7, device=DEVICE)[:, :num_drafts]
        before = Handed(torch.full((batch,), -7, device=DEVICE), randn(batch, hidden_size + 8, dtype=dtype)[:, :-8])
        after = Handed(arange(batch), randn(batch, hidden_size, seed=1, dtype=dtype))
        yield drafts, torch.tensor([num_drafts - 2], device=DEVICE), before, after


def windows() -> Iterator[Given]:
    """Any number of valid inputs, more of them than a window holds, and fewer; inputs are views of wider rows."""
    for size, num_rows, hidden_size in [(1, 2, 16), (3, 4, 40), (5, 2, 700)]:
        batch = 3
        tokens = integers(0, 99, NUM_SLOTS + 1, size), integers(100, 199, batch, num_rows + 1)[:, 1:]
        inputs = randn(batch, num_rows + 1, hidden_size + 3, seed=2)[:, 1:, :hidden_size]
        hidden = randn(NUM_SLOTS + 1, size, hidden_size)
        for first in range(num_rows):
            num_valid = (arange(batch) + first) % (num_rows + 1)
            yield tokens[0].clone(), hidden.clone(), tokens[1], inputs, places(batch)[0], num_valid


def trees(sharpness: float = 1.0) -> Iterator[Given]:
    """Trees with more rows than levels and with fewer, ties everywhere, drafts of which most are right."""
    for batch, num_rows, depth in [(5, 9, 3), (2, 2, 1), (1, 5, 7)]:
        logits, parents = ragged_logits(batch, num_rows, 11) * sharpness, draw_trees(batch, num_rows, depth)
        logits[..., 3] = float("-inf")
        yield logits, likely_drafts(parents, logits.argmax(dim=-1)), parents, arange(batch) != 1, depth


def drawn_trees() -> Iterator[Given]:
    for *walked, depth in trees(sharpness=2.0):
        yield *walked, *places(len(walked[0])), 0.7 if depth == 3 else None, depth


def imposed_trees() -> Iterator[Given]:
    for *walked, depth in trees():
        yield *walked, rates(depth), *places(len(walked[0])), depth


def either_method(*given: Any) -> Any:
    """Is the torch form of drafts that are sampled, and of given ones."""
    method = "one_hot" if given[2] is None else "standard"
    return rejection_sample(METHODS[method], round_key, *given)


def places_of_backend(*given: Any) -> tuple[torch.Tensor, ...]:
    """What the lab plans with an attention backend."""
    kv_lens, num_emitted, pages, first, num_rows, page_size, num_positions = given
    batch = RoundBatch(kv_lens, num_emitted > 0, kv_lens, kv_lens, pages, 99)
    verified = VerifiedRound(batch, Verification(kv_lens.new_zeros((len(kv_lens), num_rows)), num_emitted), None)
    plan = plan_catchup(verified, TorchAttention(page_size, num_positions), 3, first_position=first)
    rows = (
        (attention.positions, attention.slot_mapping, attention.seq_lens)
        for attention in (plan.attention, plan.live_attention)
    )
    return *next(rows), *next(rows), plan.live_rows, plan.live_lens


def looked_up() -> Iterator[Given]:
    """Texts over two tokens, with rows that emit nothing and padding that shares a slot."""
    for sizes in [(4, 2, 3), (1, 1, 1), (2, 2, 8)]:
        texts = integers(1, 3, NUM_SLOTS + 1, 40, seed=sum(sizes))
        slots = torch.tensor([2, 0, 5, NUM_SLOTS, NUM_SLOTS], device=DEVICE)
        starts, counts = (torch.tensor(part, device=DEVICE) for part in ([30, 1, 17, 1, 1], [3, 1, 0, 0, 0]))
        yield texts, slots, starts, integers(1, 3, 5, 4), counts, *sizes


def moved_paths() -> Iterator[Given]:
    """Paths of three lengths through two kinds of caches, over pages in no order, with features and without."""
    path = torch.tensor([[0, 2, 4, 7], [0, 1, 2, 3], [0, 5, 6, 7]], device=DEVICE)
    page_table = torch.randperm(3 * 12, generator=torch.Generator().manual_seed(1)).view(3, 12).to(DEVICE)
    for features in (None, randn(3 * 9, 40)[:, :33]):
        caches = [randn(2, 36 * 4, 2, 3, 8), randn(1, 36 * 4, 24, seed=1)]
        moved = None if features is None else torch.zeros(3 * 4, 33, device=DEVICE)
        yield caches, moved, features, path, torch.tensor([0, 5, 30], device=DEVICE), page_table, 4


def grown() -> Iterator[tuple[Given, Given, Given]]:
    """Levels below the root and below three branches: the pool, where branches go, and what was found; scores tie."""
    batch, topk, hidden_size = 2, 3, 40
    for width, num_before in ((1, 0), (topk, topk)):
        pool = integers(0, 99, batch, 12), -randn(batch, 12).abs(), integers(-1, 3, batch, 12)
        chosen = (*(integers(0, 99, batch, topk) for _ in range(3)), randn(batch, topk))
        found = integers(0, 99, batch, width, topk, seed=1), (-randn(batch, width, topk).abs() * 2).round() / 2
        before = (
            (None, None) if width == 1 else (arange(topk).expand(batch, -1).contiguous(), -randn(batch, topk).abs())
        )
        yield (
            pool,
            (*chosen, randn(batch * topk, hidden_size)),
            (*found, *before, randn(batch, width, hidden_size), num_before),
        )


def branched() -> Iterator[Given]:
    for pool, chosen, found in grown():
        yield *pool, *chosen, *found


def made_rows() -> Iterator[Given]:
    """As many rows as there are drafts below the root, and fewer."""
    for num_rows, (pool, _, (tokens, log_probs, numbers, scores, _, num_before)) in zip((4, 9), grown(), strict=True):
        rows = integers(0, 9, 2, num_rows - 1), integers(0, 9, 2, num_rows)
        yield *rows, *pool, tokens, log_probs, numbers, scores, num_before


def ranked() -> Iterator[Given]:
    """Ties within tiles and between them; a head that knows its own tokens, and one that knows them all."""
    for token_map, (rows, vocab_size, topk) in zip((True, False), ((4, 1500, 4), (3, 5, 5)), strict=True):
        logits = ((6 * randn(rows, vocab_size + 16)).round() / 2)[:, :vocab_size]
        logits[0, topk:] = -torch.inf
        places = torch.zeros(rows, topk, dtype=torch.int64, device=DEVICE), torch.zeros(rows, topk, device=DEVICE)
        yield *places, logits, arange(vocab_size) * 3 if token_map else None


FORMS: Mapping[Op, Form] = {
    Op.STRICT_ACCEPT: Form(strict_accept, verdicts, emits=True),
    Op.REJECTION_SAMPLE: Form(either_method, sampled, emits=True),
    Op.SYNTHETIC_ACCEPT: Form(synthetic_accept, imposed, emits=True),
    Op.DRAFT_STANDING: Form(stand, standings),
    Op.FOLLOW_TREE: Form(follow_tree, trees, emits=True),
    Op.DRAW_TREE: Form(draw_tree, drawn_trees, emits=True),
    Op.IMPOSE_PATH: Form(impose_path, imposed_trees, emits=True),
    Op.SAMPLE_DRAFT: Form(sample_and_keep, drawn),
    Op.NOTE_CONFIDENCE: Form(note_confidence, notes),
    Op.COUNT_OFFERED: Form(count_offered, offers),
    Op.CATCHUP_PLACES: Form(places_of_backend, caught_up),
    Op.COMMIT_ROWS: Form(commit_rows, committed),
    Op.CARRY_HIDDEN: Form(carry_every_tensor, handed),
    Op.MTP_WINDOW: Form(slide_windows, windows),
    Op.GOING_ON: Form(going_on, ending),
    Op.LOOK_UP: Form(extend_and_look_up, looked_up),
    Op.MOVE_PATH: Form(move_path_reference, moved_paths),
    Op.CHOOSE_BRANCHES: Form(choose_branches_reference, branched),
    Op.CHOOSE_ROWS: Form(choose_rows_reference, made_rows),
    Op.RANK_TOKENS: Form(rank_tokens_reference, ranked),
}


def lanes() -> list[Any]:
    rows = [(name, op) for name, functions in SETS.items() for op in functions]
    no_compiler = pytest.mark.skipif(build.problem() is not None, reason="needs a C compiler")
    return [
        pytest.param(name, op, marks=[no_compiler] * (name == "native"), id=f"{name}-{op.name}") for name, op in rows
    ]


def for_c(value: Any) -> Any:
    """C reads float32, and tensors on the CPU without gaps."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.cpu().float().contiguous() if value.is_floating_point() else value.cpu()


def flat(value: Any) -> list[torch.Tensor]:
    """All tensors of a value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Handed):
        return [value.tokens, value.hidden]
    return [found for part in value for found in flat(part)] if isinstance(value, tuple | list) else []


def what_is_left(form: Form, function: Callable[..., Any], given: Given) -> list[torch.Tensor]:
    """What a function returns, and its arguments behind it, junk apart."""
    result = function(*given)
    if form.emits:  # columns behind those that count are junk
        columns = torch.arange(result[0].shape[1], device=result[0].device) >= result[1].unsqueeze(1)
        result = tuple(part.masked_fill(columns, 0) if part.dim() == 2 else part for part in result)
    return flat([result if result is not None else [], list(given)])


@pytest.mark.parametrize(("kernels", "op"), lanes())
def test_a_kernel_does_what_its_torch_form_does(kernels: str, op: Op) -> None:
    form = FORMS[op]
    for number, (given, again) in enumerate(zip(form.cases(), form.cases(), strict=True)):
        if kernels == "native":
            given, again = tuple(map(for_c, given)), tuple(map(for_c, again))
        mine, expected = what_is_left(form, SETS[kernels][op], given), what_is_left(form, form.function, again)
        for left, right in zip(mine, expected, strict=True):
            assert left.dtype == right.dtype
            tolerance = 10 * TOLERANCE.get(left.dtype, 1e-10) if left.is_floating_point() else 0
            message = f"case {number}"
            torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance, equal_nan=True, msg=message)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a tape is a graph of a CPU")
@pytest.mark.parametrize("op", TRITON_FUNCTIONS)
def test_a_kernel_on_a_tape_does_what_it_does_without(op: Op) -> None:
    """Around its launches nothing is read on the host, which a graph would freeze."""
    form = FORMS[op]
    given, again = (next(iter(form.cases())) for _ in range(2))
    graph = TapeRecorder(num_warmups=0).capture(lambda: what_is_left(form, TRITON_FUNCTIONS[op], given))
    graph.replay()
    torch.testing.assert_close(graph.outputs, what_is_left(form, TRITON_FUNCTIONS[op], again), equal_nan=True)


def test_every_operator_is_asked_for_has_a_torch_form_and_a_kernel() -> None:
    """A kernel knows nothing of the lab."""
    sources = [path.read_text() for path in Path("spec_lab").rglob("*.py") if path.parent.name != "operators"]
    assert [op for op in Op if not any(f".get(Op.{op.name}," in source for source in sources)] == []
    assert set(FORMS) == {op for functions in SETS.values() for op in functions}
    sets = triton_set(), native_set()
    assert set(Op) == {op for kernels in sets for op in (*kernels.functions, *kernels.parts)}
    for function in (function for functions in SETS.values() for function in functions.values()):
        assert "spec_kernels." in f"{function.__module__} {function}"
