"""The Gemma 4 assistant through our drafter equals transformers' own drafting: first round, `position=bonus`.

After a rejection transformers is no oracle: it leaves the rejected token's keys in what the assistant reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_decoder
from spec_lab.checkpoints.gemma4_assistant_checkpoint import load_assistant
from spec_lab.core.kv_cache import NUM_RESERVED_PAGES, SCRATCH_PAGE, LayerCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.ragged import whole_prompt
from spec_lab.core.types import DraftStep
from spec_lab.drafters.frozen_kv import ANCHORS, FrozenKVDrafter, FrozenState
from spec_lab.drafters.picking import GreedyPicker
from spec_lab.models.gemma4_assistant import Gemma4Assistant
from tests.covering import each_value
from tests.tiny_checkpoints import randomize

transformers = pytest.importorskip(
    "transformers", minversion="5.18", reason="up to 5.17 the first step reads row 0 of a prompt"
)
pytest.importorskip("transformers.models.gemma4_assistant")

VOCAB, WINDOW, PAGE, POSITIONS, DRAFTS = 64, 8, 4, 128, 5
FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
ROPE = {"full_attention": FULL_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
TARGET_LAYERS = ("sliding_attention", "full_attention") * 3
ASSISTANT_LAYERS = ("sliding_attention", "sliding_attention", "full_attention")
LAST_OWNERS = {"sliding_attention": 2, "full_attention": 3}
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "centroids": {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 2},
    "one_global_kv_head": {"text": {"attention_k_eq_v": True, "num_global_key_value_heads": 1}},
    "one_head_size": {"text": {"global_head_dim": 16}},
    "unit_rope": {"text": {"rope_parameters": ROPE | {"full_attention": FULL_ROPE | {"partial_rotary_factor": 1.0}}}},
}


@pytest.fixture(scope="module", autouse=True)
def all_layers_may_share() -> Iterator[None]:
    """transformers 5.23.0 refuses every assistant: its check that a shared layer has an owner in the same model, which
    came with `kv_sharing_modes`, overlooks models whose owners are in the target."""
    from transformers import Gemma4TextConfig

    original = vars(Gemma4TextConfig).get("kv_sharing_modes")
    if original is None:
        yield
        return

    def modes(config: Any) -> Any:
        num_layers = config.num_hidden_layers
        return ["reuse"] * num_layers if config.num_kv_shared_layers == num_layers else original.fget(config)

    patch = pytest.MonkeyPatch()
    patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes))
    yield
    patch.undo()


@dataclass
class Pair:
    """A tiny Gemma 4 target, whose last two layers read KV of others, and an assistant for it."""

    target: Any
    assistant: Any
    folder: Path
    described: ModelConfig

    def drafter(self, caches: list[LayerCache], backend: AttentionBackend, position: str) -> FrozenKVDrafter:
        config, tensors = load_assistant(self.folder, self.described, self.target.dtype, "cpu")
        assert list(config.kv_sources) == [LAST_OWNERS[name] for name in ASSISTANT_LAYERS]
        anchor = ANCHORS[position]
        embedding = self.target.model.embed_tokens.weight.detach()
        head = Gemma4Assistant(config, tensors, embedding, backend, POSITIONS, anchor.extra_window_keys)
        read = [caches[source] for source in config.kv_sources]
        return FrozenKVDrafter(DRAFTS, head, read, backend, GreedyPicker(), anchor)


def make_pair(folder: Path, text: dict[str, Any] | None = None, **outer: Any) -> Pair:
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

    shared: dict[str, Any] = {
        "vocab_size": VOCAB,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": WINDOW,
        "rope_parameters": ROPE,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "max_position_embeddings": POSITIONS,
        "intermediate_size": 48,
    } | (text or {})
    target_text = Gemma4TextConfig(
        **shared,
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=6,
        layer_types=list(TARGET_LAYERS),
        num_kv_shared_layers=2,
    )
    assistant_text = Gemma4TextConfig(
        **shared,
        hidden_size=24,
        num_attention_heads=8,
        num_hidden_layers=3,
        layer_types=list(ASSISTANT_LAYERS),
        num_kv_shared_layers=3,
    )
    config = Gemma4AssistantConfig(text_config=assistant_text, backbone_hidden_size=32, **outer)
    target, assistant = Gemma4ForCausalLM(target_text).eval(), Gemma4AssistantForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    for seed, model in enumerate((target, assistant)):
        randomize(model, seed)
        for layer in model.model.layers:
            layer.layer_scalar.fill_(float(torch.rand(1, generator=generator)) + 0.5)
    if outer.get("use_ordered_embeddings"):
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB, generator=generator))
    assistant.save_pretrained(folder)
    return Pair(target, assistant, folder, read_decoder(target_text.to_dict(), "target"))


@dataclass
class Prompt:
    """A prompt run through the transformers target, with its KV copied into pages out of order."""

    token_ids: torch.Tensor
    output: Any
    caches: list[LayerCache]
    page_table: torch.Tensor
    backend: TorchAttention

    @classmethod
    @torch.inference_mode()
    def run(cls, pair: Pair, length: int, seed: int = 0) -> Prompt:
        generator = torch.Generator().manual_seed(seed)
        token_ids = torch.randint(0, VOCAB, (length + 1,), generator=generator)
        output = pair.target(
            token_ids[None, :length], output_hidden_states=True, return_shared_kv_states=True, use_cache=True
        )
        num_pages = POSITIONS // PAGE
        pages = torch.randperm(num_pages, generator=generator) + NUM_RESERVED_PAGES
        slots = (pages.unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()[:length]
        caches = []
        for index, layer in enumerate(pair.described.layers):
            shape = ((num_pages + NUM_RESERVED_PAGES) * PAGE, 2, layer.num_kv_heads, layer.head_dim)
            cache = LayerCache(torch.full(shape, float("nan"), dtype=pair.target.dtype))
            cache.kv[:PAGE] = 0.0
            kind = TARGET_LAYERS[index]
            if index == LAST_OWNERS[kind]:
                keys_and_values = torch.stack(output.shared_kv_states[kind])[:, 0]
                cache.kv[slots] = keys_and_values.permute(2, 0, 1, 3)
            caches.append(cache)
        page_table = torch.cat((pages, torch.tensor([SCRATCH_PAGE])))[None]
        return cls(token_ids, output, caches, page_table, TorchAttention(PAGE, POSITIONS))

    @property
    def length(self) -> int:
        return len(self.token_ids) - 1

    def ingest(self, drafter: FrozenKVDrafter) -> FrozenState:
        hidden = self.output.hidden_states[-1][0]
        state = drafter.ingest(whole_prompt(self.backend, self.page_table, self.token_ids, hidden, DRAFTS))
        assert state is not None
        return state

    @torch.inference_mode()
    def draft(self, pair: Pair, position: str) -> tuple[list[int], torch.Tensor]:
        """Our drafts and their logits, [DRAFTS, vocab]."""
        drafter = pair.drafter(self.caches, self.backend, position)
        state = self.ingest(drafter)
        tokens, logits = [state.tokens], [drafter.head.target_logits(state.hidden)]
        for index in range(1, DRAFTS):
            drafter.step(state, DraftStep(index, torch.tensor([index])))
            tokens.append(state.tokens)
            logits.append(drafter.head.target_logits(state.hidden))
        return torch.cat(tokens).tolist(), torch.cat(logits)

    @torch.inference_mode()
    def transformers_drafts(self, pair: Pair) -> tuple[list[int], torch.Tensor]:
        """The drafts and logits of transformers' candidate generator."""
        from transformers import GenerationConfig
        from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

        pair.assistant.generation_config.num_assistant_tokens = DRAFTS
        # 5.18 asks for the prompt and the model's arguments, later versions take no notice of them.
        generator = SinglePositionMultiTokenCandidateGenerator(
            input_ids=self.token_ids[None],
            assistant_model=pair.assistant,
            target_model_input_embeddings=pair.target.get_input_embeddings(),
            generation_config=GenerationConfig(max_length=POSITIONS),
            model_kwargs={},
        )
        ids, logits = generator.get_candidates(
            self.token_ids[None], model_kwargs={}, model_outputs=self.output, is_first_iteration=False, n_last_matches=0
        )
        return ids[0, self.length + 1 :].tolist(), logits[0]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {name: make_pair(tmp_path_factory.mktemp(name), **options) for name, options in CASES.items()}


@pytest.mark.parametrize(
    ("case", "length"), each_value(CASES, [1, PAGE, WINDOW + 1, WINDOW + 2, 5 * WINDOW + 3], times=2)
)
def test_drafts_equal_those_of_transformers(pairs: dict[str, Pair], case: str, length: int) -> None:
    """The prompts are shorter than the sliding window, at its edge, and five times as long."""
    prompt = Prompt.run(pairs[case], length, seed=length)
    drafts, logits = prompt.draft(pairs[case], "bonus")
    expected, expected_logits = prompt.transformers_drafts(pairs[case])
    assert drafts == expected
    scored = logits > float("-inf")
    torch.testing.assert_close(logits[scored], expected_logits[scored], rtol=0, atol=2e-5)
    # transformers gives what it did not score one and the same number, under every score.
    floors = expected_logits.amin(dim=1, keepdim=True).expand_as(logits)
    assert torch.equal(expected_logits[~scored], floors[~scored])
    assert scored.sum(dim=1).tolist() == [VOCAB if pairs[case].assistant.masked_embedding is None else 16] * DRAFTS


def test_norms_round_as_those_of_transformers(tmp_path: Path) -> None:
    """Attention is left out of the assistant, since its steps are rounded elsewhere here."""
    pair = make_pair(tmp_path)
    for layer in pair.assistant.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    pair.target.bfloat16()
    pair.assistant.bfloat16().save_pretrained(tmp_path)
    prompt = Prompt.run(pair, WINDOW)
    drafts, logits = prompt.draft(pair, "bonus")
    expected, expected_logits = prompt.transformers_drafts(pair)
    assert drafts == expected and torch.equal(logits, expected_logits)


def test_several_drafts_differ(pairs: dict[str, Pair]) -> None:
    """The chain moves: a recurrent vector that is not fed back would repeat one token."""
    drafts = [
        prompt_drafts
        for seed in range(4)
        for prompt_drafts in Prompt.run(pairs["dense"], 20, seed).draft(pairs["dense"], "last")[0]
    ]
    assert len(set(drafts)) > 8


def test_the_two_positions_differ(pairs: dict[str, Pair]) -> None:
    prompt = Prompt.run(pairs["dense"], 20)
    _, last = prompt.draft(pairs["dense"], "last")
    _, bonus = prompt.draft(pairs["dense"], "bonus")
    assert (last - bonus).abs().max() > 1e-3


@torch.inference_mode()
def test_transformers_hands_over_the_normed_hidden_state(pairs: dict[str, Pair]) -> None:
    """So `FeatureSpec` asks for the side of the final norm that the target's head reads."""
    prompt = Prompt.run(pairs["dense"], 20)
    logits = pairs["dense"].target.lm_head(prompt.output.hidden_states[-1])
    torch.testing.assert_close(logits, prompt.output.logits)


@torch.inference_mode()
@pytest.mark.parametrize(("position", "num_seen"), [("last", WINDOW), ("bonus", WINDOW + 1)])
def test_edge_of_the_sliding_window(pairs: dict[str, Pair], position: str, num_seen: int) -> None:
    """`last` sees `sliding_window` keys, as vLLM; `bonus` one more, as transformers, whose mask admits the distance."""
    pair, prompt = pairs["dense"], Prompt.run(pairs["dense"], 3 * WINDOW)
    _, logits = prompt.draft(pair, position)
    sliding = prompt.caches[LAST_OWNERS["sliding_attention"]].kv
    for back, changes in ((num_seen, True), (num_seen + 1, False)):
        key_position = prompt.length - back
        slot = int(prompt.page_table[0, key_position // PAGE]) * PAGE + key_position % PAGE
        kept = sliding[slot].clone()
        sliding[slot] = 5.0
        _, changed = prompt.draft(pair, position)
        assert torch.equal(changed, logits) is not changes, back
        sliding[slot] = kept


@torch.inference_mode()
def test_last_reads_keys_as_vllm_does(pairs: dict[str, Pair]) -> None:
    """`last` from transformers' model: position L - 1, and a window whose mask admits one key less."""
    pair, prompt = pairs["dense"], Prompt.run(pairs["dense"], 3 * WINDOW)
    drafts, logits = prompt.draft(pair, "last")
    keys, values = prompt.output.shared_kv_states["sliding_attention"]
    states = dict(prompt.output.shared_kv_states) | {
        "sliding_attention": (keys[:, :, -WINDOW:], values[:, :, -WINDOW:])
    }
    token, recurrent = prompt.token_ids[None, -1:], prompt.output.hidden_states[-1][:, -1:]
    for draft, ours in zip(drafts, logits, strict=True):
        embeddings = torch.cat((pair.target.get_input_embeddings()(token), recurrent), dim=-1)
        out = pair.assistant(
            inputs_embeds=embeddings,
            position_ids=torch.tensor([[prompt.length - 1]]),
            shared_kv_states=states,
            use_cache=False,
        )
        torch.testing.assert_close(ours, out.logits[0, 0], rtol=0, atol=2e-5)
        token, recurrent = out.logits.argmax(-1), out.last_hidden_state
        assert int(token) == draft
