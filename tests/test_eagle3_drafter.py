"""The EAGLE-3 drafter against a chain recomputed from the checkpoint's tensors, without any cache."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.core.types import AcceptanceInputs, DraftStep, PromptChunk, Request, Verification, VerifiedRound
from spec_lab.drafters.picking import GivenDrafts
from spec_lab.drafters.recurrent import RecurrentDrafter, RecurrentState
from spec_lab.engine.engine import Engine
from spec_lab.models.config import read_model_config
from tests.fake_target import PaddedGraph
from tests.lab import NEAR_TIE, Reference, make_config, make_engine, random_requests
from tests.tiny_checkpoints import make_tiny_eagle3, make_tiny_target

HEADS: dict[str, dict[str, Any]] = {
    "safeailab": {},
    "speculators": {"format": "speculators"},
    "norm_before_residual": {"norm_before_residual": True},
    "speculators_norm_before_residual": {"format": "speculators", "norm_before_residual": True},
    "qwen3_layer": {"family": "qwen3"},
    "own_embedding": {"embed_tokens": True},
    "whole_vocabulary": {"draft_vocab_size": 160},
    "other_taps": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
    "own_rope": {"rope_theta": 300.0},
    "other_heads": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
}
PRUNES = ["none", "catchup"]


@dataclass
class SlowHead:
    """The paper's head in a few lines: every row of the chain is recomputed for every draft."""

    tensors: dict[str, torch.Tensor]
    options: dict[str, Any]
    reference: Reference

    @torch.inference_mode()
    def draft(self, text: list[int], num_draft_tokens: int) -> tuple[list[int], list[torch.Tensor]]:
        """Drafts after `text` and the logits of each. Row p pairs token t[p+1] with the feature of position p."""
        hidden_states = self.reference.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        taps = self.options.get("eagle_aux_hidden_state_layer_ids", [2, 4, 5])
        features = torch.cat([hidden_states[layer][0, :-1] for layer in taps], dim=-1)
        rows, tokens = features @ self.tensors["fc.weight"].T, text[1:]
        drafts, all_logits = [], []
        for _ in range(num_draft_tokens):
            out = self._layer(tokens, rows)[-1]
            logits = self._norm(out, "norm") @ self.tensors["lm_head.weight"].T
            draft = int(logits.argmax())
            target_id = draft + int(self.tensors["d2t"][draft]) if "d2t" in self.tensors else draft
            drafts.append(target_id)
            all_logits.append(logits)
            tokens, rows = [*tokens, target_id], torch.cat((rows, out[None]))
        return drafts, all_logits

    def _layer(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        get = self.tensors.__getitem__
        table = self.tensors.get("embed_tokens.weight", self.reference.model.model.embed_tokens.weight)
        normed = self._norm(hidden, "midlayer.hidden_norm")
        attended = self._attention(torch.cat((self._norm(table[tokens], "midlayer.input_layernorm"), normed), dim=-1))
        stream = (normed if self.options.get("norm_before_residual") else hidden) + attended
        rows = self._norm(stream, "midlayer.post_attention_layernorm")
        gate = F.silu(rows @ get("midlayer.mlp.gate_proj.weight").T) * (rows @ get("midlayer.mlp.up_proj.weight").T)
        return stream + gate @ get("midlayer.mlp.down_proj.weight").T

    def _attention(self, rows: torch.Tensor) -> torch.Tensor:
        prefix, head_dim = "midlayer.self_attn.", self.options.get("head_dim", 16)
        q, k, v = (
            (rows @ self.tensors[f"{prefix}{name}_proj.weight"].T).view(len(rows), -1, head_dim) for name in "qkv"
        )
        if f"{prefix}q_norm.weight" in self.tensors:
            q, k = self._norm(q, f"{prefix}q_norm"), self._norm(k, f"{prefix}k_norm")
        q, k = self._rotate(q), self._rotate(k)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5
        scores = scores.masked_fill(torch.ones(len(rows), len(rows)).triu(1).bool(), float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        return out @ self.tensors[f"{prefix}o_proj.weight"].T

    def _rotate(self, heads: torch.Tensor) -> torch.Tensor:
        half = heads.shape[-1] // 2
        frequencies = self.options.get("rope_theta", 10000.0) ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(len(heads)), frequencies).unsqueeze(1)
        first, second = heads[..., :half], heads[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.tensors[f"{name}.weight"]


@dataclass
class RecordingDrafter(GivenDrafts):
    """An EAGLE-3 drafter whose draft logits are kept by slot."""

    drafter: RecurrentDrafter
    logits: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    slots: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_draft_tokens = self.drafter.num_draft_tokens
        self.requirements = self.drafter.requirements

    def admit(self, slot: int, request: Request) -> None:
        self.drafter.admit(slot, request)

    def ingest(self, chunk: PromptChunk) -> RecurrentState | None:
        state = self.drafter.ingest(chunk)
        return state and self._keep(state, [chunk.slot])

    def seed(self, verified: VerifiedRound) -> RecurrentState:
        return self._keep(self.drafter.seed(verified), verified.batch.slot_ids.tolist())

    def step(self, state: RecurrentState, step: DraftStep) -> None:
        self.drafter.step(state, step)
        self._keep(state, self.slots, step.index)

    def _keep(self, state: RecurrentState, slots: list[int], index: int = 0) -> RecurrentState:
        self.slots = slots
        for slot, logits in zip(slots, self.drafter._head.draft_logits(state.hidden), strict=True):
            self.logits[slot] = [*self.logits[slot][:index], logits] if index else [logits]
        return state


@dataclass
class ScriptedRule(StrictAcceptance):
    """Accepts m drafts whatever the target says, so that every n comes up; compares the drafts with the slow chain."""

    slow: SlowHead
    drafter: RecordingDrafter
    engine: Engine | None = None
    compared: int = 0
    accepted: list[int] = field(default_factory=list)
    script: random.Random = field(default_factory=lambda: random.Random(1))

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        assert self.engine is not None
        logits, draft_tokens, active = inputs.logits, inputs.draft_tokens, inputs.active
        num_drafts = draft_tokens.shape[1]
        sequences = [s for s in self.engine.scheduler.running if not s.is_prefilling]
        for sequence, drafts in zip(sequences, draft_tokens.tolist(), strict=False):
            self._compare(sequence.tokens, drafts, self.drafter.logits[sequence.slot])
        accepted = [self.script.randrange(num_drafts + 1) for _ in range(len(active))]
        self.accepted += accepted[: len(sequences)]
        num_accepted = torch.tensor(accepted)
        keep = torch.arange(num_drafts) < num_accepted.unsqueeze(1)
        tokens = logits.argmax(dim=-1)
        tokens[:, :-1] = torch.where(keep, draft_tokens, tokens[:, :-1])
        return Verification(tokens, torch.where(active, num_accepted + 1, 0))

    def _compare(self, text: list[int], drafts: list[int], logits: list[torch.Tensor]) -> None:
        expected, expected_logits = self.slow.draft(text, len(drafts))
        for ours, theirs, draft, token in zip(logits, expected_logits, drafts, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
            if draft != token:
                first, second = theirs.topk(2).values.tolist()
                assert first - second < NEAR_TIE
                return
        self.compared += len(drafts)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Reference]]:
    """Two targets: GQA 4:2, and one key-value head for each query head, which no head here has."""
    found = {}
    targets: dict[str, dict[str, Any]] = {"gqa": {}, "mha": {"num_key_value_heads": 4}}
    for name, options in targets.items():
        folder = tmp_path_factory.mktemp(name)
        make_tiny_target(folder, "qwen3", **options)
        found[name] = folder, Reference(folder)
    return found


def run_against_slow_chain(
    target: tuple[Path, Reference],
    folder: Path,
    head: dict[str, Any],
    prune: str,
    num_draft_tokens: int = 3,
    batch_size: int = 3,
    bucket: int = 1,
    num_requests: int = 4,
) -> ScriptedRule:
    tensors = make_tiny_eagle3(folder, read_model_config(target[0]), **head)
    requests = [
        Request(r.request_id, r.category, r.prompt_ids, 18, ignore_eos=True)
        for r in random_requests(num_requests, lengths=(1, 12), seed=2)
    ]
    requests[0] = Request("one", "x", (17,), 18, ignore_eos=True)
    cache = {"page_size": 4, "prefill_chunk": 5}
    config = make_config((target[0], folder), "eagle3", num_draft_tokens, prune, batch_size=batch_size, cache=cache)
    engine = make_engine(config, requests)
    assert isinstance(engine.parts.drafter, RecurrentDrafter)
    drafter = RecordingDrafter(engine.parts.drafter)
    rule = ScriptedRule(SlowHead(tensors, head, target[1]), drafter, engine)
    engine.parts.drafter, engine.parts.rule = drafter, rule
    engine.graph = PaddedGraph(bucket)
    engine.generate(requests)
    return rule


@pytest.mark.parametrize("prune", PRUNES)
@pytest.mark.parametrize("head", HEADS)
def test_drafts_equal_the_whole_chain_recomputed(
    targets: dict[str, tuple[Path, Reference]], tmp_path: Path, head: str, prune: str
) -> None:
    """After prompts of one token and of several chunks, and after rounds of every n."""
    rule = run_against_slow_chain(targets["gqa"], tmp_path, HEADS[head], prune)
    assert set(rule.accepted) == {0, 1, 2, 3} and rule.compared > 50


@pytest.mark.parametrize("prune", ["none", "prefill", "post_attention", "catchup"])
def test_a_head_may_group_its_heads_in_another_way_than_the_target(
    targets: dict[str, tuple[Path, Reference]], tmp_path: Path, prune: str
) -> None:
    rule = run_against_slow_chain(targets["mha"], tmp_path, {}, prune)
    assert rule.compared > 50


@pytest.mark.parametrize("num_draft_tokens", [1, 5])
@pytest.mark.parametrize("bucket", [1, 4])
def test_other_numbers_of_drafts_and_padded_rows(
    targets: dict[str, tuple[Path, Reference]], tmp_path: Path, num_draft_tokens: int, bucket: int
) -> None:
    rule = run_against_slow_chain(targets["gqa"], tmp_path, {}, "catchup", num_draft_tokens, bucket=bucket)
    assert set(rule.accepted) == set(range(num_draft_tokens + 1))


def test_a_draft_vocabulary_is_mapped_to_target_ids(targets: dict[str, tuple[Path, Reference]], tmp_path: Path) -> None:
    """d2t holds offsets: draft id i is target id i + d2t[i]."""
    tensors = make_tiny_eagle3(tmp_path, read_model_config(targets["gqa"][0]))
    requests = random_requests(1)
    drafter = make_engine(make_config((targets["gqa"][0], tmp_path)), requests).parts.drafter
    assert isinstance(drafter, RecurrentDrafter)
    hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    logits = drafter._head.draft_logits(hidden)
    assert logits.shape == (50, 120)
    kept = tensors["t2d"].nonzero().flatten()
    assert drafter._head.greedy(hidden).tolist() == kept[logits.argmax(-1)].tolist()


def test_equal_draft_logits_give_the_lowest_id(targets: dict[str, tuple[Path, Reference]], tmp_path: Path) -> None:
    make_tiny_eagle3(tmp_path, read_model_config(targets["gqa"][0]), draft_vocab_size=160)
    drafter = make_engine(make_config((targets["gqa"][0], tmp_path)), random_requests(1)).parts.drafter
    assert isinstance(drafter, RecurrentDrafter)
    assert drafter._head.greedy(torch.zeros(3, 32)).tolist() == [0, 0, 0]
