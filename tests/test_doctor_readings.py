"""Every drafter's other readings, on random tiny heads and texts that these heads drafted: only the reading that wrote
a text agrees with it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_lab.build.limits import engine_limits
from spec_lab.build.models import load_models
from spec_lab.checkpoints.families import read_model_config
from spec_lab.config.run import Run
from spec_lab.core.results import RequestRecord
from spec_lab.core.types import FinishReason
from spec_lab.doctor.aspects import Aspect, aspects_of
from spec_lab.doctor.evidence import Evidence
from spec_lab.doctor.findings import Finding, Verdict, faults
from spec_lab.doctor.readings import check_readings
from spec_lab.doctor.rounds import LoopRound
from spec_lab.doctor.subject import Subject
from spec_lab.doctor.teacher_forced import Drafted, TeacherForcedDrafts
from tests.lab import make_config, random_requests
from tests.tiny_assistant import make_tiny_assistant
from tests.tiny_blocks import TinyBlock, write_block
from tests.tiny_checkpoints import make_tiny_eagle3, make_tiny_target
from tests.tiny_mtp import make_tiny_mtp

NUM_DRAFT_TOKENS, NUM_TEXTS, ROUNDS_A_TEXT = 3, 4, 4
PROJECTION = "eh_proj.weight"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_tiny_target(folder, "qwen3", num_hidden_layers=5)
    return folder


def make_head(drafter: str, folder: Path, target: Path) -> None:
    config = read_model_config(target)
    if drafter == "eagle3":
        make_tiny_eagle3(folder, config, eagle_aux_hidden_state_layer_ids=[1, 2, 3])  # not the default
    elif drafter == "frozen_kv":
        make_tiny_assistant(folder, config, kv_source_layers=[1, 3])
    elif drafter == "dflash":
        write_block(folder, TinyBlock(outputs=(1, 3)), config)
    else:
        make_tiny_mtp(folder, "ours", config, NUM_DRAFT_TOKENS)


def subject_of(config: Run) -> Subject:
    """A subject of the doctor whose texts are the prompts alone."""
    requests = random_requests(NUM_TEXTS, ROUNDS_A_TEXT * (NUM_DRAFT_TOKENS + 1) + 1, lengths=(4, 20))
    limits = engine_limits(config, requests)
    models = load_models(config, limits.max_seq_len)
    return Subject(config, models, models, requests, limits, [record(r.prompt_ids, []) for r in requests])


def record(prompt_ids: tuple[int, ...], output_ids: list[int]) -> RequestRecord:
    none: list[Any] = []
    return RequestRecord(
        "",
        "",
        list(prompt_ids),
        output_ids,
        "",
        None,
        none,
        none,
        none,
        none,
        False,
        FinishReason.LENGTH,
        len(output_ids),
        0.0,
        none,
    )


def with_drafted_texts(subject: Subject) -> tuple[Subject, list[LoopRound]]:
    """Replace the texts by a pending token and its K drafts, again and again; there is a round for each pending
    token.
    """
    outputs: list[list[int]] = [[7 + text] for text in range(NUM_TEXTS)]
    rounds: list[LoopRound] = []
    for number in range(ROUNDS_A_TEXT):
        places = [
            LoopRound(text, len(subject.requests[text].prompt_ids) + len(output) - 1, NUM_DRAFT_TOKENS)
            for text, output in enumerate(outputs)
        ]
        room = [0] * NUM_DRAFT_TOKENS
        drafts = TeacherForcedDrafts(_with_outputs(subject, [[*o, *room] for o in outputs]), places).draft(
            subject.config.drafter.build
        )
        for text, tokens in enumerate(drafts.tokens.tolist()):
            outputs[text] += [*tokens, 11 + 5 * number + text]
        rounds += places
    return _with_outputs(subject, outputs), rounds


def _with_outputs(subject: Subject, outputs: list[list[int]]) -> Subject:
    pairs = zip(subject.requests, outputs, strict=True)
    return replace(subject, plain=[record(request.prompt_ids, output) for request, output in pairs])


def findings_of(right: Run, wrong: Run) -> list[Finding]:
    """What the readings say of `wrong`, over texts that the drafter of `right` drafted."""
    writer = subject_of(right)
    subject, rounds = with_drafted_texts(writer)
    subject = replace(subject, config=wrong)
    forced = TeacherForcedDrafts(subject, rounds)
    as_configured = forced.draft(wrong.drafter.build)
    engine = subject.engine(wrong)
    features = engine.parts.drafter.requirements
    evidence = Evidence(subject, features.features, forced, as_configured, as_configured)
    return check_readings(evidence, aspects_of(forced.lab(0)))


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 2, "use_sliding_window": True}
WRONG: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "taps": ("eagle3", "tap ids", "file", {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}),
    "residual": ("eagle3", "norm order", "file", {"norm_before_residual": True}),
    "recycled_output": ("eagle3", "norm order", "file", {"norm_output": True}),
    "window": ("eagle3", "attention window", "options", {"window": 2}),
    "window_of_a_block": ("dflash", "attention window", "options", {"window": 2}),
    "window_of_its_file": ("dflash", "attention window", "file", SLIDING),
    "taps_the_other_way": ("eagle3", "tap ids", "file", {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}),
    "d2t": ("eagle3", "d2t offsets", "shift", {}),
    "concat": ("mtp_eagle", "concat order", "swap", {}),
    "target_side": ("mtp_eagle", "norm order", "options", {"target_hidden": "pre_norm"}),
    "both_sides": ("mtp_eagle", "norm order", "options", {"target_hidden": "pre_norm", "recycled_hidden": "pre_norm"}),
    "vanilla_handed_on": ("mtp_vanilla", "norm order", "options", {"recycled_hidden": "pre_norm"}),
    "vanilla_order": ("mtp_vanilla", "module order", "rotate", {}),
    "frozen_position": ("frozen_kv", "query position", "options", {"position": "bonus"}),
    "frozen_sources": ("frozen_kv", "KV source layers", "file", {"kv_source_layers": [0, 2]}),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_reading_that_wrote_the_text_is_named(target: Path, tmp_path: Path, case: str) -> None:
    drafter, aspect, how, change = WRONG[case]
    make_head(drafter, tmp_path / "right", target)
    make_head(drafter, tmp_path / "wrong", target)
    if how == "file":
        path = tmp_path / "wrong" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    elif how == "swap":
        swap_halves(tmp_path / "wrong" / "model.safetensors", PROJECTION)
    elif how == "rotate":
        rotate_modules(tmp_path / "wrong" / "model.safetensors")
    elif how == "shift":
        shift_map(tmp_path / "wrong" / "model.safetensors")
    right, wrong = (
        make_config((target, tmp_path / side), drafter, NUM_DRAFT_TOKENS, options=options)
        for side, options in (("right", {}), ("wrong", change if how == "options" else {}))
    )
    assert [finding.check for finding in faults(findings_of(right, wrong))] == [aspect]


@pytest.mark.parametrize("drafter", ["eagle3", "mtp_vanilla", "frozen_kv"])
def test_no_other_reading_beats_the_right_one(target: Path, tmp_path: Path, drafter: str) -> None:
    make_head(drafter, tmp_path, target)
    config = make_config((target, tmp_path), drafter, NUM_DRAFT_TOKENS)
    findings = findings_of(config, config)
    assert {"concat order"} < {finding.check for finding in findings}
    assert {finding.verdict for finding in findings} == {Verdict.OK}


def swap_halves(file: Path, suffix: str) -> None:
    tensors = load_file(file)
    names = [name for name in tensors if name.endswith(suffix)]
    assert names
    swapped = {name: torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1).contiguous() for name in names}
    save_file(tensors | swapped, file, metadata={"format": "pt"})


def rotate_modules(file: Path) -> None:
    """Put each module under the number of the one before it, and the first under the last's."""
    tensors = load_file(file)
    first = min(int(name.split(".")[2]) for name in tensors)
    rotated: dict[str, torch.Tensor] = {}
    for module in range(NUM_DRAFT_TOKENS):
        ours, theirs = (f"model.layers.{first + index % NUM_DRAFT_TOKENS}." for index in (module, module + 1))
        rotated |= {ours + name.removeprefix(theirs): tensors[name] for name in tensors if name.startswith(theirs)}
    assert rotated.keys() == tensors.keys()
    save_file(rotated, file, metadata={"format": "pt"})


def shift_map(file: Path) -> None:
    tensors = load_file(file)
    draft_ids = torch.arange(len(tensors["d2t"]))
    d2t = (draft_ids + tensors["d2t"] + 1) % len(tensors["t2d"]) - draft_ids
    save_file(tensors | {"d2t": d2t, "t2d": torch.roll(tensors["t2d"], 1)}, file, metadata={"format": "pt"})


def test_a_clear_gain_is_a_fault_beside_a_larger_unclear_one() -> None:
    accepted = {"unclear": [3, 0] * 20, "clear": [2] * 12 + [1] * 28}

    def draft(make: Any) -> Drafted:
        return Drafted(torch.zeros(40, 3), torch.tensor(accepted[make(None)]))

    configured = Drafted(torch.zeros(40, 3), torch.ones(40))
    evidence = SimpleNamespace(forced=SimpleNamespace(draft=draft), as_configured=configured)
    option = SimpleNamespace(model=lambda lab, config, tensors: config, drafter=lambda lab, model: model)
    aspect = Aspect("two readings", "as it is", {name: (option, name, None) for name in accepted})
    (finding,) = check_readings(cast("Evidence", evidence), [aspect])
    assert finding.verdict == Verdict.FAULT
    assert finding.cause == "read as as it is, but clear gives +0.30 drafts a round"
