"""NextN modules whose layer has experts, of GLM-4.5, and with latent attention of DeepSeek-V3 and GLM-4.7-Flash.

They are compared with transformers' own modules, run in the loop, and pruned.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.mtp_checkpoint import load_mtp
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass
from spec_lab.models.linear import make_linear
from spec_lab.models.mtp import MtpModule
from spec_lab.models.rope import rotary_table
from tests.lab import Reference, assert_captured_alike, generate, make_config, random_requests
from tests.test_catchup_pruning import HIDDEN, KNOB, assert_same, draft, make_lane, random_round
from tests.tiny_experts import add_nextn, make_tiny_nextn
from tests.tiny_latent import make_latent_target

LENGTH = 100
KINDS = ("glm4_moe", "deepseek_v3", "glm4_moe_lite")


@dataclass
class Nextn:
    """A folder with target and modules, and both as transformers has them."""

    folder: Path
    model: Any
    modules: Any

    def head(self, backend: AttentionBackend, window: int | None = None) -> MtpModule:
        """The first module, which has no window."""
        assert window is None
        target = read_model_config(self.folder)
        config, (tensors, *_) = load_mtp(self.folder, target, 1, torch.float32, "cpu")
        plan = config.layer.only_layer
        rotary = rotary_table(plan.rope, plan.head_dim, LENGTH, torch.float32, "cpu")
        embedding, head = self.model.model.embed_tokens.weight.detach(), self.model.lm_head.weight.detach()
        return MtpModule(config, tensors, embedding, make_linear(head), rotary, backend)


def make_nextn(folder: Path, kind: str, num_modules: int = 1) -> Nextn:
    """A GLM-4.5, or a target with latent attention, and its modules."""
    if kind == "glm4_moe":
        return Nextn(folder, *make_tiny_nextn(folder, num_modules))
    model = make_latent_target(folder, kind, num_nextn_predict_layers=num_modules)
    if kind == "glm4_moe_lite":  # transformers wants these said before it makes modules
        model.config.num_mtp_layers, model.config.mtp_mlp_layer_types = num_modules, ["sparse"] * num_modules
    return Nextn(folder, model, add_nextn(folder, model, num_modules))


@pytest.fixture(scope="module", params=KINDS)
def nextn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Nextn:
    return make_nextn(tmp_path_factory.mktemp(request.param), request.param)


@torch.inference_mode()
def test_the_module_equals_transformers(nextn: Nextn) -> None:
    """Its layer has experts though the target's first has none; half of a GLM-4.5 head turns; the norms stand around
    it. The rows of its cache are compared too."""
    from transformers.cache_utils import MtpCache

    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(160, (LENGTH,), generator=generator)
    hidden = torch.randn(LENGTH, HIDDEN, generator=generator)
    positions = torch.arange(LENGTH)[None]
    cache = MtpCache(config=nextn.model.config.get_mtp_config())
    expected = nextn.modules.forward_layer(0, hidden[None], positions, cache, input_ids=token_ids[None])[0]
    module = nextn.head(TorchAttention(4, LENGTH))
    assert read_model_config(nextn.folder).layers[0].experts is None
    lane = make_lane(nextn, "none", [0])
    backend, table = lane.drafter.backend, lane.table
    outputs = []
    for start, end in ((0, 40), (40, 41), (41, 45), (45, 80)):
        attention = backend.build(positions[:, start:end], torch.tensor([end]), table.pages[:1], end)
        out = module.forward(token_ids[start:end], hidden[start:end], Pass(lane.cache, attention))
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs), expected[:80], rtol=0, atol=2e-5)
    torch.testing.assert_close(
        module.draft_logits(outputs[-1]), nextn.model.lm_head(expected[45:80]), rtol=0, atol=5e-5
    )
    keys, values = cache.layers[0].keys[0], cache.layers[0].values[0]  # latent numbers and rotated key of latent rows
    is_latent = module.config.layer.only_layer.latent is not None
    rows = torch.cat((keys, values), dim=-1)[0] if is_latent else torch.stack((keys, values)).permute(2, 0, 1, 3)
    torch.testing.assert_close(lane.rows(torch.tensor([80]))[0], rows[:80], rtol=0, atol=2e-5)


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_pruned_catchup_writes_the_same_cache_and_drafts_the_same(nextn: Nextn, num_draft_tokens: int) -> None:
    """Requests with n = 1..N beside padded rows: bit-equal KV, close live hidden states, equal drafts."""
    num_rows = num_draft_tokens + 1
    kv_lens = [1, 7, 16, 31][:num_rows]
    lanes = {knob: make_lane(nextn, knob, kv_lens, num_draft_tokens, num_padded=2) for knob in KNOB}
    tokens, features = random_round(num_rows, num_rows)
    features = features[:, :HIDDEN]
    for num_emitted in (list(range(1, num_rows + 1)), list(range(num_rows, 0, -1))):
        drafted = {knob: draft(lane, lane.verified(tokens, features, num_emitted)) for knob, lane in lanes.items()}
        assert_same(drafted["post_attention"], drafted["none"])
        assert_same(drafted["pre_attention"], drafted["none"])


def test_the_loops_text_is_greedy(nextn: Nextn) -> None:
    reference, requests = Reference(nextn.folder), random_requests(4, max_new_tokens=8)
    plain = {request.request_id: reference.greedy(request) for request in requests}
    config = make_config((nextn.folder, nextn.folder), "mtp_eagle", prune="catchup", batch_size=3)
    reference.assert_lossless(requests, generate(config, requests), plain)


def test_graphs_hold_the_experts(nextn: Nextn) -> None:
    config = make_config((nextn.folder, nextn.folder), "mtp_eagle", prune="catchup", batch_size=3)
    graph = "round" if read_model_config(nextn.folder).layers[0].latent is None else "step_replay"
    assert_captured_alike(config, graph, random_requests(3, max_new_tokens=6))


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_module_for_each_draft(tmp_path: Path, kind: str) -> None:
    make_nextn(tmp_path, kind, num_modules=2)
    reference, requests = Reference(tmp_path), random_requests(3, max_new_tokens=8)
    plain = {request.request_id: reference.greedy(request) for request in requests}
    config = make_config((tmp_path, tmp_path), "mtp_vanilla", 2, prune="catchup", batch_size=3)
    reference.assert_lossless(requests, generate(config, requests), plain)
