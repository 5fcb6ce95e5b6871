"""A block drafter written down from its papers: the whole text, dense masks, torch's own GRU, no cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from tests.lab import Reference
from tests.tiny_blocks import HEAD_DIM, TOPK, TinyBlock

EPS = 1e-5


@dataclass
class SlowBlock:
    """Drafts after a text. Row p of the context is made of the target's hidden states of token p, but for the last."""

    tensors: dict[str, torch.Tensor]
    block: TinyBlock
    reference: Reference
    sure: list[float] = field(default_factory=list)
    most_context: int | None = None

    @torch.inference_mode()
    def draft(self, text: list[int], num_draft_tokens: int) -> tuple[list[int], list[torch.Tensor]]:
        """Drafts in target ids, and the logits [vocab] of each, -inf where a head scores no token."""
        return self.follow(text, [None] * num_draft_tokens)

    @torch.inference_mode()
    def follow(self, text: list[int], drafts: Sequence[int | None]) -> tuple[list[int], list[torch.Tensor]]:
        """The same, where each of `drafts` is the one that was taken; None is the likeliest."""
        states = self.reference.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        taps = [states[output + 1][0, :-1] for output in self.block.outputs]  # HF counts the embedding
        context = self._norm(torch.cat(taps, dim=-1) @ self.tensors["fc.weight"].T, "hidden_norm")
        rows = self._norm(self._body(context, text[-1]), "norm")[self.block.first_row :]
        table = self.reference.model.lm_head.weight
        if self.block.draft_vocab_size is not None:
            kept = self.tensors["d2t"] + torch.arange(self.block.draft_vocab_size)
            table = table[kept] if self.block.shares_head else self.tensors["lm_head.weight"]
        logits = rows @ table.T * (self.block.output_multiplier or 1.0)
        if cap := self.block.softcap:
            logits = (logits / cap).tanh() * cap
        return self._walk(rows[: self.block.most_drafts], logits, context, text[-1], drafts)

    def _body(self, context: torch.Tensor, pending: int) -> torch.Tensor:
        mask_token = self.reference.model.lm_head.weight.shape[0] - 1
        stream = self._embedded(torch.tensor([pending] + [mask_token] * (self.block.block_size - 1)))
        for index in range(self.block.num_layers):
            stream = stream + self._half(stream, index, "input_layernorm", "attention_conv", context)
            stream = stream + self._half(stream, index, "post_attention_layernorm", "mlp_conv", context)
        return stream

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        embed = self.reference.model.model.embed_tokens  # multiplies by a scale of its own in Gemma's
        scale = self.block.embedding_scale
        return embed(tokens) if scale is None else embed.weight[tokens] * scale

    def _half(self, stream: torch.Tensor, index: int, norm: str, conv: str, context: torch.Tensor) -> torch.Tensor:
        prefix = f"layers.{index}."
        rows = self._norm(stream, f"{prefix}{norm}")
        part = self._attention if conv == "attention_conv" else self._mlp
        if not self.block.conv:
            return part(rows, index, context)
        base = self.tensors[f"{prefix}{conv}.base_kernel"]
        own = (rows @ self.tensors[f"{prefix}{conv}.kernel_projection.weight"].T).view(len(rows), 2, 2, -1)
        kernels = base + own.repeat_interleave(8, dim=-1)  # [rows, side, tap, channel]
        return self._convolve(part(self._convolve(rows, kernels[:, 0]), index, context), kernels[:, 1])

    def _convolve(self, rows: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        before = torch.cat((torch.zeros_like(rows[:1]), rows[:-1]))
        return rows * kernels[:, 0] + before * kernels[:, 1]

    def _mlp(self, rows: torch.Tensor, index: int, context: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.tensors[f"layers.{index}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (F.silu(rows @ gate.T) * (rows @ up.T)) @ down.T

    def _attention(self, rows: torch.Tensor, index: int, context: torch.Tensor) -> torch.Tensor:
        def projected(name: str, inputs: torch.Tensor) -> torch.Tensor:
            weight = self.tensors[f"layers.{index}.self_attn.{name}_proj.weight"]
            return (inputs @ weight.T).view(len(inputs), -1, HEAD_DIM)

        anchor, size = len(context), len(rows)
        keys = self._norm(projected("k", torch.cat((context, rows))), f"layers.{index}.self_attn.k_norm")
        keys = self._rotate(keys, torch.arange(anchor + size))
        values = projected("v", torch.cat((context, rows)))
        queries = self._norm(projected("q", rows), f"layers.{index}.self_attn.q_norm")
        queries = self._rotate(queries, torch.arange(anchor, anchor + size))
        group = queries.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / HEAD_DIM**0.5
        weights = scores.masked_fill(~self._visible(anchor, size, index), float("-inf")).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
        return out @ self.tensors[f"layers.{index}.self_attn.o_proj.weight"].T

    def _visible(self, anchor: int, size: int, index: int) -> torch.Tensor:
        """A block row sees context from W rows before the anchor on, and its block: all of it, or up to itself. W is
        the smaller one of the file's window and the run's. With `is_causal`, z-lab's `_attention_mask` is the rule."""
        keys, rows = torch.arange(anchor + size), torch.arange(anchor, anchor + size).unsqueeze(1)
        visible = (keys >= 0).expand(size, -1)
        of_file = self.block.window if index in self.block.sliding else None
        if self.block.is_causal is not None:
            window, run = of_file or anchor + size, self.most_context or anchor
            seen = (rows - keys < window) & (keys >= anchor - run)
            return seen & (keys <= rows) if self.block.is_causal else seen
        window = min((limit for limit in (of_file, self.most_context) if limit is not None), default=None)
        if window is None:
            return visible
        if of_file is None or self.block.non_causal:
            return visible & (keys >= anchor - window)
        return (keys <= rows) & (keys > rows - window)  # as vLLM runs causal layers

    def _walk(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        context: torch.Tensor,
        pending: int,
        drafts: Sequence[int | None],
    ) -> tuple[list[int], list[torch.Tensor]]:
        tokens, found = [pending], []
        edges = self._lattice(hidden, logits, context) if self.block.head == "lattice" else None
        for slot, draft in enumerate(drafts):
            scores = edges(slot, tokens) if edges is not None else self._scores(slot, tokens, hidden, logits[slot])
            found.append(scores)
            tokens.append(int(scores.argmax()) if draft is None else draft)
            self.sure = [*self.sure[:slot], self._confidence(slot, tokens, hidden)]
        return tokens[1:], found

    def _scores(self, slot: int, tokens: list[int], hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        get = self.tensors.get
        if self.block.head == "markov":
            logits = logits + self._markov(slot, tokens, hidden)
        if self.block.head == "gru" and slot > 0:
            gru = torch.nn.GRU(hidden.shape[1], 10, bias=False, batch_first=True)
            gru.load_state_dict({name: self.tensors[f"prefix_gru.{name}"] for name in gru.state_dict()})
            state = gru(self._embedded(torch.tensor(tokens))[None])[1][0, 0]
            read = torch.cat((hidden[slot], state)) @ self.tensors["embed_proj.0.weight"].T
            logits = logits + F.silu(read) @ self.tensors["embed_proj.2.weight"].T
        if self.block.head == "selector":
            before = self.tensors["candidate_selector.predecessor_codebook"][tokens[-1]]
            projected = self.tensors["candidate_selector.hidden_projection.weight"] @ hidden[slot]
            pairs = self.tensors["candidate_selector.successor_codebook"] @ (before * projected)
            best = logits.topk(TOPK).indices
            logits = torch.full_like(logits, float("-inf")).index_put((best,), logits[best] + pairs[best])
        if get("d2t") is None:
            return logits
        ids = torch.arange(len(logits)) + self.tensors["d2t"]
        whole = self.reference.model.lm_head.weight.shape[0]
        return logits.new_full((whole,), float("-inf")).index_put((ids,), logits)

    def _confidence(self, slot: int, tokens: list[int], hidden: torch.Tensor) -> float:
        """Of the draft at `slot`, from its row and the token in front of it."""
        if not self.block.confidence:
            return 1.0
        read = torch.cat((hidden[slot], self.tensors["markov_head.markov_w1.weight"][tokens[slot]]))
        return float(self._linear("confidence_head.proj", read).sigmoid())

    def _markov(self, slot: int, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        w1, w2 = (self.tensors[f"markov_head.markov_w{number}.weight"] for number in (1, 2))
        if self.block.form == "vanilla":
            return w1[tokens[-1]] @ w2.T
        if self.block.form == "gated":
            gate = self._linear("markov_head.gate_proj", torch.cat((hidden[slot], w1[tokens[-1]])))
            return (gate.sigmoid() * w1[tokens[-1]]) @ w2.T
        state = torch.zeros(w1.shape[1])
        out = state
        for earlier in range(slot + 1):
            joint = self._linear("markov_head.joint_proj", torch.cat((state, w1[tokens[earlier]], hidden[earlier])))
            gate, candidate, out = joint.chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
        return out.tanh() @ w2.T

    def _lattice(
        self, hidden: torch.Tensor, logits: torch.Tensor, context: torch.Tensor
    ) -> Callable[[int, list[int]], torch.Tensor]:
        """Edges of LiLiCorr: from the context's last row, and from candidate to candidate."""
        slots, topk = len(hidden), 4
        log_probs, ids = logits[:slots].log_softmax(-1).topk(topk)
        name = "lilicorr."
        states = self._linear(f"{name}token_proj", self._embedded(ids))
        states = states + self._linear(f"{name}pass_hidden_proj", hidden)[:, None]
        rank = torch.arange(topk).expand(slots, -1)
        features = torch.stack(
            (log_probs, log_probs.exp(), log_probs - log_probs[:, :1], rank / (topk - 1), (rank == 0).float()), dim=-1
        )
        norm = self.tensors[f"{name}feature_norm.weight"], self.tensors[f"{name}feature_norm.bias"]
        states = states + self._silu_mlp(f"{name}feature_mlp", F.layer_norm(features, (5,), *norm))
        states = states + self.tensors[f"{name}slot_embedding"][0, 0] + self.tensors[f"{name}rank_embedding"][0, 0]
        stream = states.flatten(0, 1)
        slot = torch.arange(slots).repeat_interleave(topk)
        distance = slot[:, None] - slot
        bias = self.tensors[f"{name}relative_slot_bias"][:, distance + self.block.block_size - 1]
        bias = bias + (distance == 0) * self.tensors[f"{name}same_slot_bias"][:, None, None]
        for index in range(2):
            layer = f"{name}layers.{index}."
            rows = self._norm(stream, f"{layer}attn_norm")
            weight, own = self.tensors[f"{layer}attn.in_proj_weight"], self.tensors[f"{layer}attn.in_proj_bias"]
            q, k, v = (part.view(-1, 2, 12) for part in (rows @ weight.T + own).chunk(3, dim=-1))
            attention = (torch.einsum("qhd,khd->hqk", q, k) / 12**0.5 + bias).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", attention, v).flatten(1)
            stream = stream + self._linear(f"{layer}attn.out_proj", mixed)
            stream = stream + self._silu_mlp(f"{layer}mlp", self._norm(stream, f"{layer}mlp_norm"))
        stream = self._norm(stream, f"{name}output_norm")
        anchor = self._norm(self._linear(f"{name}context_proj", context[-1]), f"{name}anchor_norm")
        read = torch.cat((stream, anchor.expand_as(stream), stream * anchor), dim=-1)
        factors = F.silu(self._linear(f"{name}factor_input_proj", read))
        leaving, entering = (
            F.normalize(self._linear(f"{name}{head}", factors), dim=-1).view(slots, topk, -1)
            for head in ("out_head", "in_head")
        )
        start = F.normalize(self._linear(f"{name}anchor_out_head", anchor), dim=-1)

        def scores(slot: int, tokens: list[int]) -> torch.Tensor:
            before = start if slot == 0 else leaving[slot - 1, ids[slot - 1].tolist().index(tokens[-1])]
            edges = 5.0 * entering[slot] @ before
            return torch.full_like(logits[slot], float("-inf")).index_put((ids[slot],), edges)

        return scores

    def _silu_mlp(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return self._linear(f"{name}.down_proj", F.silu(self._linear(f"{name}.up_proj", rows)))

    def _linear(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return rows / (rows.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * self.tensors[f"{name}.weight"]

    def _rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = heads.shape[-1] // 2
        angles = torch.outer(positions, 10000.0 ** (-torch.arange(half) / half)).unsqueeze(1)
        first, second = heads[..., :half], heads[..., half:]
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
        )
