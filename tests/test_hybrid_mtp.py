"""`drafter=mtp_eagle` with the NextN modules of Qwen3.5 and Qwen3-Next, each in its target's checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.checkpoint import stored_tensors
from spec_lab.checkpoints.config import num_mtp_modules, read_keys
from spec_lab.config.choices import Rollback
from spec_lab.config.run import RecurrentConfig
from spec_lab.core.types import NormSide
from tests.covering import each_value
from tests.graph_lab import MODES, Lab, accepted_lengths, assert_equal_to_eager, mixed_requests
from tests.lab import Reference, generate, make_config, random_requests
from tests.scripted_rule import compare_drafts
from tests.tiny_hybrid import KINDS, VOCAB, make_tiny_nextn
from tests.tiny_mtp import target_hidden_states

NUM_TENSORS = {"qwen3_5": 15, "qwen3_5_with_vision": 15, "qwen3_5_moe": 19, "qwen3_next": 19}


@dataclass
class SlowNextn:
    """A reference that drafts with transformers' module, recomputing the whole chain for every draft."""

    reference: Reference
    module: Any

    @torch.inference_mode()
    def draft(self, text: list[int], num_draft_tokens: int) -> tuple[list[int], list[torch.Tensor]]:
        hidden = target_hidden_states(self.reference, text, NormSide.POST_NORM)[:-1]
        tokens, drafts, all_logits = text[1:], [], []
        for _ in range(num_draft_tokens):
            positions = torch.arange(len(tokens))[None]
            out = self.module.forward_layer(0, hidden[None], positions, None, input_ids=torch.tensor([tokens]))[0, -1]
            all_logits.append(self.reference.model.lm_head(out))
            drafts.append(int(all_logits[-1].argmax()))
            tokens, hidden = [*tokens, drafts[-1]], torch.cat((hidden, out[None]))
        return drafts, all_logits


class Pairs(dict[str, tuple[Path, Any]]):
    def __init__(self, folders: pytest.TempPathFactory) -> None:
        super().__init__()
        self._folders = folders

    def __missing__(self, kind: str) -> tuple[Path, Any]:
        folder = self._folders.mktemp(kind)
        self[kind] = folder, make_tiny_nextn(folder, kind)
        return self[kind]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """The folder of each kind, made when a test first asks for it, and transformers' module."""
    return Pairs(tmp_path_factory)


def config_of(folder: Path, prune: str = "none", **changes: Any) -> Any:
    return make_config((folder, folder), "mtp_eagle", 3, prune, cache={"page_size": 4, "prefill_chunk": 5}, **changes)


@pytest.mark.parametrize(("kind", "prune"), each_value(KINDS, ["none", "post_attention", "catchup"]))
def test_drafts_equal_the_whole_chain_recomputed(
    pairs: dict[str, tuple[Path, Any, Any]], kind: str, prune: str
) -> None:
    """After prompts of one token and of several chunks, and after rounds of every n; pruned or not."""
    folder, module = pairs[kind]
    sizes = {"num_requests": 3, "vocab_size": VOCAB, "bucket": 2, "batch_size": 2}
    rule = compare_drafts(SlowNextn(Reference(folder), module), (folder, folder), "mtp_eagle", 3, prune, **sizes)
    assert set(rule.accepted) == {0, 1, 2, 3} and rule.compared > 20
    assert sum(name.startswith("mtp.") for name in stored_tensors(folder)) == NUM_TENSORS[kind]
    assert num_mtp_modules(read_keys(folder)) == 1


@pytest.mark.parametrize(
    ("mode", "rollback"), each_value(["split_seed", "step_replay", "full_loop", "overlap"], Rollback)
)
def test_a_captured_mode_gives_what_eager_gives(pairs: Pairs, mode: str, rollback: Rollback) -> None:
    """The same drafts, tokens, keys and states, in batches of every size; a capture changes nothing that is live."""
    folder, _ = pairs["qwen3_5"]
    lab = Lab(folder, {"mtp_eagle": folder}, "cpu")
    options: dict[str, Any] = {"drafter": "mtp_eagle", "batch_size": 3, "recurrent": RecurrentConfig(rollback)}
    result = assert_equal_to_eager(lab, MODES[mode], mixed_requests(4, 10), **options)
    assert len(accepted_lengths(result)) >= 3


@pytest.mark.parametrize(("kind", "mode", "plan"), [("qwen3_next", "eager", "cost"), ("qwen3_5_moe", "round", "none")])
def test_text_equals_greedy_of_transformers(
    pairs: Pairs, kind: str, mode: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spec_lab.engine.measured_costs.SECONDS", 0.0)
    folder, _ = pairs[kind]
    reference, requests = Reference(folder), random_requests(4, 10, vocab_size=VOCAB)
    expected = {request.request_id: reference.greedy(request) for request in requests}
    config = config_of(folder, "catchup", batch_size=3, options={"plan": plan})
    outputs = generate(config if mode == "eager" else replace(config, graph=MODES[mode]), requests)
    reference.assert_lossless(requests, outputs, expected)
