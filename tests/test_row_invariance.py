"""Where few rows do not depend on each other, the teacher is plain decoding bit for bit, and so is what is decoded.

Under Triton's interpreter in float16, since its products of bfloat16 are wrong; on a GPU in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import spec_lab
from spec_lab.build import models
from spec_lab.build.engine import build_teacher
from spec_lab.build.limits import engine_limits
from spec_lab.config.choices import Dtype, KernelsChoice
from spec_lab.core.kernel_set import TORCH_FORMS
from spec_lab.measure.lab import LoadedRun, load_lab
from tests.kernel_lab import DEVICE
from tests.lab import part
from tests.tiny_checkpoints import make_tiny_target
from tests.tiny_runs import make_run_config, write_prompts, write_tokenizer

DTYPE = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16
CHUNK, LIMIT = 24, 3
PROMPTS = [{"id": "a", "prompt": "a-prompt-of-27-characters-..", "form": "continue"}]


def write_target(folder: Path) -> Path:
    make_tiny_target(folder, "qwen3", num_hidden_layers=2)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    """A run in 16 bits whose target is row-invariant, and whose prompt has two chunks."""
    folder = tmp_path_factory.mktemp("invariant")
    config = make_run_config(
        (write_target(folder), folder),
        write_prompts(folder / "prompts.jsonl", PROMPTS),
        "ngram",
        references=["plain"],
        max_new_tokens=LIMIT,
        device=str(DEVICE),
        kernels=KernelsChoice.triton,
        cache={"prefill_chunk": CHUNK, "prefill_tokens": 1},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "resolve_dtype", lambda name, device: DTYPE)
        return load_lab(replace(config, attention=part("attention", "triton")))


@contextmanager
def kept_logits(lab: LoadedRun) -> Iterator[list[torch.Tensor]]:
    """Give a list into which go the [rows, vocab] logits that the target computes inside the block."""
    kept: list[torch.Tensor] = []
    own = lab.models.target.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        kept.append(own(hidden).clone())
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab.models.target, "logits", logits)
        yield kept


def test_the_teacher_has_the_logits_of_plain_decoding(lab: LoadedRun) -> None:
    """Of a request by itself, bit for bit, from the prompt's last row on. Whole chunks of a text round otherwise."""
    assert lab.models.invariant_rows == 16
    with kept_logits(lab) as expected:
        (record,) = lab.engines["plain"].generate(lab.requests).requests
    assert len(record.output_ids) == len(expected) == LIMIT
    with kept_logits(lab) as found:
        lab.teacher.greedy_choices(record.prompt_ids, record.output_ids)
    assert torch.equal(torch.cat(found), torch.cat(expected))
    limits = engine_limits(lab.config, lab.requests)
    with kept_logits(lab) as rounded_otherwise:
        target = copy(lab.models.target)
        target.kernels = TORCH_FORMS
        no_promise = replace(lab.models, target=target)
        build_teacher(lab.config, no_promise, limits).greedy_choices(record.prompt_ids, record.output_ids)
    assert not torch.equal(torch.cat(rounded_otherwise)[-LIMIT:], torch.cat(expected))


CHAIN = ("drafter=eagle3",)
TREE = ("drafter=frozen_kv", "tree=dynamic", "drafter.num_draft_tokens=5", "tree.num_rows=16")


@pytest.mark.gpu
@pytest.mark.parametrize(("drafts", "batch_size"), [(CHAIN, 1), (CHAIN, 4), (TREE, 1)])
def test_speculative_output_in_bfloat16_is_that_of_plain_decoding(
    drafts: tuple[str, ...], batch_size: int, tmp_path: Path
) -> None:
    """The shipped pair, whole rounds in a graph; by plain decoding beside it, and by the teacher's own judgement."""
    assert_equal_to_plain(tmp_path, batch_size, *drafts, "device=cuda", "dtype=bfloat16", "graph=round")


def assert_equal_to_plain(folder: Path, batch_size: int, *overrides: str) -> None:
    shared = [
        *("prune=catchup", "repeats=1", "warmup_requests=0", "profile_rounds=0"),
        *("workload.limit=12", "max_new_tokens=48", f"batch_size={batch_size}", *overrides),
    ]
    for references in ("[plain]", "[]"):
        composed = spec_lab.compose([f"output_dir={folder}", f"references={references}", *shared])
        summary = spec_lab.run(composed).run
        found = summary.under("divergence")
        assert summary.row_invariant is (composed.config.dtype == Dtype.bfloat16)
        assert found["requests"] == 12
        assert (found["near_ties"], found["bugs"]) == (0, 0)
