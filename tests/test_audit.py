"""The audit against outputs of a real engine: what was tampered with is found where it was, and called what it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spec_lab.core.results import RequestRecord
from spec_lab.core.types import FinishReason
from spec_lab.engine.teacher import GreedyChoice
from spec_lab.measure.audit import audit
from spec_lab.measure.lab import MAIN, LoadedRun, load_lab
from spec_lab.record.models import Divergence
from tests.tiny_checkpoints import rewrite_tensors
from tests.tiny_runs import make_run_config, make_runnable_pair, write_prompts

LIMIT = 12
CHUNK = 8
EOS = 2
NUM_LOGITS = 160
PROMPTS = [{"id": f"r{i}", "prompt": "spoken-words"[: 1 + 2 * i] * (1 + i), "form": "continue"} for i in range(4)]
HALF = NUM_LOGITS // 2


def make_lab(folder: Path, pair: tuple[Path, Path], dtype: str = "float32") -> LoadedRun:
    """A lab without references, so that the run has nothing but its own text. Some prompts are longer than a chunk."""
    prompts = write_prompts(folder / "prompts.jsonl", PROMPTS)
    config = make_run_config(
        pair, prompts, references=[], batch_size=2, max_new_tokens=LIMIT, cache={"prefill_chunk": CHUNK}, dtype=dtype
    )
    return load_lab(config)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    folder = tmp_path_factory.mktemp("lab")
    return make_lab(folder, make_runnable_pair(folder))


@pytest.fixture(scope="module")
def tied_lab(tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    """A lab whose tokens i and i + 80 are one and the same, going in and coming out: each decision is a tie."""
    folder = tmp_path_factory.mktemp("tied")
    pair = make_runnable_pair(folder)
    tensors = load_file(pair[0] / "model.safetensors")
    names = ("lm_head.weight", "model.embed_tokens.weight")
    rewrite_tensors(pair[0], {name: torch.cat([tensors[name][:HALF]] * 2) for name in names})
    return make_lab(folder, pair)


@pytest.fixture(params=["against plain outputs", "by teacher forcing"])
def with_plain(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "against plain outputs")


def generate(lab: LoadedRun) -> list[RequestRecord]:
    return lab.engines[MAIN].generate(lab.requests).requests


def judge(lab: LoadedRun, record: RequestRecord, plain: list[int] | None, lossless: bool = True) -> list[Divergence]:
    plain_outputs = None if plain is None else {record.request_id: plain}
    return list(audit([record], plain_outputs, lab.teacher, lab.models.dtype, lossless).values())


def tampered(record: RequestRecord, index: int, token: int) -> RequestRecord:
    return replace(record, output_ids=[*record.output_ids[:index], token, *record.output_ids[index + 1 :]])


def corruptions(records: list[RequestRecord]) -> Iterator[tuple[RequestRecord, int, int]]:
    """Yield a record, an index of its output, and a token that does not belong there: first, middle and last."""
    for record in records:
        for index in {0, len(record.output_ids) // 2, len(record.output_ids) - 1}:
            yield record, index, 3 + (record.output_ids[index] + 40) % (NUM_LOGITS - 3)


def test_an_untouched_run_has_no_divergence(lab: LoadedRun) -> None:
    records = generate(lab)
    plain = {record.request_id: list(record.output_ids) for record in records}
    assert sum(len(record.output_ids) for record in records) > LIMIT
    assert audit(records, plain, lab.teacher, lab.models.dtype) == {}
    assert audit(records, None, lab.teacher, lab.models.dtype) == {}


def test_a_corrupted_token_is_a_bug_at_its_index(lab: LoadedRun, with_plain: bool) -> None:
    for record, index, token in corruptions(generate(lab)):
        plain = record.output_ids if with_plain else None
        [divergence] = judge(lab, tampered(record, index, token), plain)
        assert (divergence.index, divergence.kind) == (index, "bug")
        assert divergence.margin is not None and divergence.margin > 0


def test_a_divergence_under_a_lossy_rule_is_its_price(lab: LoadedRun, with_plain: bool) -> None:
    record = generate(lab)[0]
    wrong = tampered(record, 3, (record.output_ids[3] + 1) % NUM_LOGITS)
    [divergence] = judge(lab, wrong, record.output_ids if with_plain else None, lossless=False)
    assert (divergence.index, divergence.kind) == (3, "lossy")


def test_an_output_that_stops_early_is_a_bug_where_it_stops(lab: LoadedRun, with_plain: bool) -> None:
    for record in generate(lab):
        short = replace(record, output_ids=record.output_ids[:5], finish_reason=FinishReason.LENGTH)
        [divergence] = judge(lab, short, record.output_ids if with_plain else None)
        assert (divergence.index, divergence.kind, divergence.margin) == (5, "bug", None)


def test_an_output_that_claims_an_end_of_sequence_without_one_is_a_bug(lab: LoadedRun) -> None:
    record = generate(lab)[0]
    assert EOS not in record.output_ids
    [divergence] = judge(lab, replace(record, finish_reason=FinishReason.EOS), None)
    assert (divergence.index, divergence.kind) == (LIMIT, "bug")


def test_the_later_of_two_tied_tokens_is_a_near_tie(tied_lab: LoadedRun, with_plain: bool) -> None:
    for record in generate(tied_lab):
        plain = record.output_ids if with_plain else None
        [divergence] = judge(tied_lab, tampered(record, 4, record.output_ids[4] + HALF), plain)
        assert (divergence.index, divergence.margin, divergence.kind) == (4, 0.0, "near_tie")


def test_a_tie_excuses_only_the_tokens_that_are_tied(tied_lab: LoadedRun, with_plain: bool) -> None:
    """Plain decoding's two best are equal at every position; a third token is as wrong as ever."""
    for record, index, _ in corruptions(generate(tied_lab)):
        third = 3 + (record.output_ids[index] + 40) % (HALF - 3)
        [divergence] = judge(tied_lab, tampered(record, index, third), record.output_ids if with_plain else None)
        assert (divergence.index, divergence.margin, divergence.kind) == (index, 0.0, "bug")


def test_teacher_forcing_does_not_depend_on_the_chunks(lab: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest prompt is several chunks of 8 rows, or one of 512 whose logits come in stretches of 6."""
    cache = replace(lab.config.cache, prefill_chunk=512)
    whole = load_lab(replace(lab.config, cache=cache))
    record = max(generate(lab), key=lambda record: len(record.prompt_ids))
    assert len(record.prompt_ids) > 2 * CHUNK
    text = record.prompt_ids, record.output_ids
    many = lab.teacher.greedy_choices(*text)
    monkeypatch.setattr("spec_lab.engine.teacher.MOST_LOGIT_ROWS", 6)
    one = whole.teacher.greedy_choices(*text)
    assert one.token_ids == many.token_ids
    assert one.top_logits == pytest.approx(many.top_logits, abs=1e-4)
    assert one.gaps == pytest.approx(many.gaps, abs=1e-4)


@pytest.mark.parametrize(("noise", "kind"), [(0.1, "near_tie"), (0.05, "bug")])
def test_what_parts_beyond_the_rounding_of_its_logit_is_judged_by_the_noise_of_the_target(
    lab: LoadedRun, with_plain: bool, monkeypatch: pytest.MonkeyPatch, noise: float, kind: str
) -> None:
    """A gap of .5 under a logit of 10 is six steps of bfloat16. The noise is measured once."""
    records = generate(lab)
    wrong = [tampered(record, 0, (record.output_ids[0] + 1) % NUM_LOGITS) for record in records]
    asked: list[int] = []

    def choose(prompt_ids: list[int], output_ids: list[int]) -> GreedyChoice:
        own = {record.output_ids[0]: right.output_ids[0] for record, right in zip(wrong, records, strict=True)}
        num = len(output_ids)
        return GreedyChoice([own[output_ids[0]], *output_ids[1:]], [10.0] * num, [0.5] * num, [0.5] * num)

    def measure(token_ids: list[int]) -> float:
        asked.append(len(token_ids))
        return noise

    monkeypatch.setattr(lab.teacher, "greedy_choices", choose)
    monkeypatch.setattr(lab.teacher, "margin_noise", measure)
    plain = {record.request_id: record.output_ids for record in records} if with_plain else None
    found = audit(wrong, plain, lab.teacher, torch.bfloat16)
    assert [divergence.kind for divergence in found.values()] == [kind] * len(records)
    assert len(asked) == 1
    assert all(divergence.kind == "bug" for divergence in audit(wrong, plain, lab.teacher, torch.float32).values())
    assert len(asked) == 1


def test_margins_are_noisy_in_bfloat16_and_not_in_float32(lab: LoadedRun, tmp_path: Path) -> None:
    """Of a text longer than a chunk, of which the end is run a row at a time and in chunks."""
    record = max(generate(lab), key=lambda record: len(record.prompt_ids))
    text = [*record.prompt_ids, *record.output_ids]
    narrow = make_lab(tmp_path, make_runnable_pair(tmp_path), "bfloat16")
    step = torch.finfo(torch.bfloat16).eps * max(lab.teacher.greedy_choices(text[:1], text[1:]).top_logits)
    assert lab.teacher.margin_noise(text) < 1e-5
    assert step / 100 < narrow.teacher.margin_noise(text) < 3 * step
