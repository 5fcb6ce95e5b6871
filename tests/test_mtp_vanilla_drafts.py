"""drafter=mtp_vanilla on random weights: its drafts against modules recomputed from the text."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.families import read_model_config
from spec_lab.config.run import SamplingConfig
from spec_lab.core.types import AcceptanceInputs, NormSide, Request, Sequence
from spec_lab.drafters.picking import GreedyPicker
from spec_lab.engine.engine import Engine
from tests.engine_state import poison
from tests.fake_target import PaddedGraph
from tests.lab import NEAR_TIE, Reference, make_config, make_engine
from tests.scripted_rule import RecordingPicker, ScriptedAcceptance, random_script
from tests.tiny_checkpoints import make_tiny_target
from tests.tiny_mtp import TinyMtp, make_tiny_mtp, target_hidden_states


@dataclass
class SlowModules:
    """A reference without a cache: every row of every module is computed anew for every draft."""

    modules: list[TinyMtp]
    reference: Reference
    target_hidden: NormSide
    recycled_hidden: NormSide

    @torch.inference_mode()
    def logits(self, text: list[int], drafts: list[int]) -> torch.Tensor:
        """The logits [num_draft_tokens, vocab] of each draft, after `text` and the drafts before it.

        Row p pairs token t[p+1] with the hidden state of position p; module i leaves out the first i rows.
        """
        model = self.reference.model
        tokens, hidden = text[1:], target_hidden_states(self.reference, text, self.target_hidden)[:-1]
        found = []
        for index, (module, draft) in enumerate(zip(self.modules, drafts, strict=False)):
            out = module(model.model.embed_tokens.weight[tokens[index:]], hidden[index:])[-1]
            normed = module.final_norm(out)
            found.append(model.lm_head(normed))
            recycled = normed if self.recycled_hidden is NormSide.POST_NORM else out
            tokens, hidden = [*tokens, draft], torch.cat((hidden, recycled[None]))
        return torch.stack(found)


@dataclass
class ComparingRule(ScriptedAcceptance):
    """A rule that compares what was drafted from with the slow modules."""

    slow: SlowModules = field(kw_only=True)
    picker: RecordingPicker = field(default_factory=RecordingPicker)

    def check(self, sequence: Sequence, drafts: list[int], inputs: AcceptanceInputs, row: int) -> None:
        expected = self.slow.logits(sequence.tokens, drafts)
        if inputs.draft_logits is None:
            ours = torch.stack(self.picker.logits[sequence.slot])
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
            drafted = expected.gather(1, torch.tensor(drafts).unsqueeze(1)).squeeze(1)
            assert (expected.amax(1) - drafted < NEAR_TIE).all()
        else:
            sampled_from = inputs.draft_logits[row].softmax(-1)
            torch.testing.assert_close(sampled_from, (expected / 0.7).softmax(-1), rtol=0, atol=1e-5)


@dataclass
class Lab:
    """A target of 64 positions, three modules for it, and the target in transformers."""

    target: Path
    folder: Path
    modules: list[TinyMtp]
    reference: Reference

    def engine(self, requests: list[Request], prune: str, bucket: int = 1, **changes: Any) -> Engine:
        """An engine whose caches, the drafter's too, and windows start as NaN."""
        sampling = changes.pop("sampling", SamplingConfig())
        config = make_config((self.target, self.folder), "mtp_vanilla", prune=prune, **changes)
        engine = make_engine(replace(config, sampling=sampling), requests)
        engine.graph = PaddedGraph(bucket)
        poison(engine)
        return engine

    def check_drafts(
        self,
        requests: list[Request],
        prune: str,
        bucket: int = 1,
        script: Callable[[int], int] | None = None,
        **changes: Any,
    ) -> ComparingRule:
        options = changes.get("options", {})
        sides = [NormSide(options.get(knob, "post_norm")) for knob in ("target_hidden", "recycled_hidden")]
        engine = self.engine(requests, prune, bucket, **changes)
        rule = ComparingRule(engine, script or random_script(), slow=SlowModules(self.modules, self.reference, *sides))
        if isinstance(engine.parts.drafter.picker, GreedyPicker):
            engine.parts.drafter.picker = rule.picker
        engine.parts.rule = rule
        engine.generate(requests)
        assert not engine.parts.drafter.window.hidden[-1].any(), "padded rows leave the scratch slot's window alone"
        return rule


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    target, folder = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("mtp")
    make_tiny_target(target, "qwen3", max_position_embeddings=64)
    modules = make_tiny_mtp(folder, "ours", read_model_config(target), num_modules=3)
    return Lab(target, folder, modules, Reference(target))


def mixed_requests() -> list[Request]:
    """Prompts of one token, of two, of several chunks; the last ends at the target's last position."""
    generator = random.Random(2)
    lengths = {1: 12, 2: 12, 11: 9, 3: 12, 55: 9}
    return [
        Request(f"r{length}", "c", tuple(generator.randrange(3, 160) for _ in range(length)), limit, ignore_eos=True)
        for length, limit in lengths.items()
    ]


# prune, batch_size, num_draft_tokens, page_size, chunk, bucket
CASES = [
    ("none", 3, 2, 1, 1, 4),
    ("prefill", 3, 3, 4, 2, 1),
    ("post_attention", 3, 3, 16, 5, 4),
    ("catchup", 3, 3, 4, 1, 4),
    ("catchup", 1, 1, 4, 512, 4),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_drafts_equal_the_modules_recomputed(lab: Lab, case: tuple[str, int, int, int, int, int]) -> None:
    prune, batch_size, num_draft_tokens, page_size, chunk, bucket = case
    cache = {"page_size": page_size, "prefill_chunk": chunk}
    rule = lab.check_drafts(
        mixed_requests(), prune, bucket, batch_size=batch_size, num_draft_tokens=num_draft_tokens, cache=cache
    )
    assert set(rule.accepted) == set(range(num_draft_tokens + 1)) and len(rule.accepted) > 12


@pytest.mark.parametrize("num_accepted", [0, 3])
def test_all_and_none_accepted(lab: Lab, num_accepted: int) -> None:
    rule = lab.check_drafts(mixed_requests()[:3], "catchup", script=lambda _: num_accepted, cache={"page_size": 4})
    assert set(rule.accepted) == {num_accepted} and len(rule.accepted) > 5


@pytest.mark.parametrize(("target_hidden", "recycled_hidden"), [("pre_norm", "post_norm"), ("post_norm", "pre_norm")])
def test_either_side_of_the_norms(lab: Lab, target_hidden: str, recycled_hidden: str) -> None:
    options = {"target_hidden": target_hidden, "recycled_hidden": recycled_hidden}
    assert len(lab.check_drafts(mixed_requests()[:2], "catchup", options=options).accepted) > 4


def test_sampled_drafts_hand_over_their_logits(lab: Lab) -> None:
    sampling = SamplingConfig(temperature=0.7)
    options = {"draft_sampling": "distribution"}
    rule = lab.check_drafts(mixed_requests()[:3], "catchup", batch_size=2, sampling=sampling, options=options)
    assert len(rule.accepted) > 6
