"""Batched continuation of many prompts by the target.

`generate` has a cache of fixed size, and on a GPU one CUDA graph for each batch. `generate_plainly` has neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import Qwen3Config, Qwen3ForCausalLM

log = logging.getLogger(__name__)

STEPS_BETWEEN_CHECKS = 16


@dataclass(frozen=True, slots=True)
class Continuation:
    """Token ids of a prompt and of the model's continuation, which ends with a stop token if it is `finished`."""

    prompt: list[int]
    written: list[int]
    finished: bool


def generate(
    model: Qwen3ForCausalLM,
    prompts: list[list[int]],
    max_new_tokens: int,
    batch_size: int,
    temperature: float = 0.0,
) -> list[Continuation]:
    """Continue every prompt until a stop token or `max_new_tokens`, and return the continuations in the prompts' order.

    Temperature 0 is greedy. Each batch has prompts of similar length. Sampling draws from torch's global generator.
    """
    continuations: dict[int, Continuation] = {}
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(by_length), batch_size):
        indices = by_length[start : start + batch_size]
        part = _continue_batch(model, [prompts[index] for index in indices], max_new_tokens, temperature)
        continuations.update(zip(indices, part, strict=True))
        log.info("continued %d of %d prompts", len(continuations), len(prompts))
    return [continuations[index] for index in range(len(prompts))]


@torch.inference_mode()
def _continue_batch(
    model: Qwen3ForCausalLM, prompts: list[list[int]], max_new_tokens: int, temperature: float
) -> list[Continuation]:
    batch = Batch.of(model, prompts, max_new_tokens)
    stop_ids = torch.tensor(model.generation_config.eos_token_id, device=model.device)
    batch.prefill(model, temperature)
    step: Callable[[], None] = partial(batch.step, model, temperature, stop_ids)
    for count in range(1, max_new_tokens):
        step()
        if count == 1 and model.device.type == "cuda":
            step = captured(step)  # only after one plain call, for setup that is impossible in a capture
        if count % STEPS_BETWEEN_CHECKS == 0 and bool(batch.finished.all()):
            break
    rows = zip(prompts, batch.tokens.tolist(), strict=True)
    written = ((prompt, row[len(prompt) : len(prompt) + max_new_tokens]) for prompt, row in rows)
    return [_cut(prompt, behind, stop_ids.tolist()) for prompt, behind in written]


def _cut(prompt: list[int], written: list[int], stop_ids: list[int]) -> Continuation:
    """Cut the continuation after its first stop token."""
    stop = next((index for index, token in enumerate(written) if token in stop_ids), None)
    return Continuation(prompt, written if stop is None else written[: stop + 1], stop is not None)


@torch.inference_mode()
def generate_plainly(model: Any, prompts: list[list[int]], max_new_tokens: int, batch_size: int) -> list[Continuation]:
    """Continue every prompt greedily with transformers' own generation, whose cache supports every kind of layer."""
    stop_ids, pad_id = model.generation_config.eos_token_id, model.generation_config.pad_token_id
    continuations: list[Continuation] = []
    for start in range(0, len(prompts), batch_size):
        part = prompts[start : start + batch_size]
        width = max(map(len, part))
        rows = [[pad_id] * (width - len(prompt)) + prompt for prompt in part]
        seen = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in part]
        tokens, mask = (torch.tensor(table, device=model.device) for table in (rows, seen))
        written = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=max_new_tokens)[:, width:]
        continuations += [_cut(prompt, row, stop_ids) for prompt, row in zip(part, written.tolist(), strict=True)]
        log.info("continued %d of %d prompts", len(continuations), len(prompts))
    return continuations


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return a function that replays `step` as a CUDA graph. Capturing runs nothing."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class FixedCache:
    """Keys and values `[layers][batch, kv_heads, length, head_dim]`, written at each row's own positions.

    It replaces transformers' caches; decoder layers only call `update`. A growing cache is copied in every
    step, and cannot be captured.
    """

    def __init__(self, config: Qwen3Config, batch_size: int, length: int, like: Tensor) -> None:
        shape = (config.num_hidden_layers, batch_size, config.num_key_value_heads, length, config.head_dim)
        self.keys = like.new_zeros(shape)
        self.values = like.new_zeros(shape)
        self.positions = torch.zeros(batch_size, 1, dtype=torch.long, device=like.device)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write `[batch, kv_heads, rows, head_dim]` at `positions` `[batch, rows]`; return the whole layer."""
        index = self.positions[:, None, :, None].expand_as(key)
        self.keys[layer].scatter_(2, index, key)
        self.values[layer].scatter_(2, index, value)
        return self.keys[layer], self.values[layer]


@dataclass(slots=True)
class Batch:
    """Rows being continued. `tokens` `[batch, length]`, padded on the right; `last` `[batch]`: where each row ends."""

    tokens: Tensor
    last: Tensor
    finished: Tensor
    cache: FixedCache

    @classmethod
    def of(cls, model: Qwen3ForCausalLM, prompts: list[list[int]], max_new_tokens: int) -> Batch:
        # Attention kernels require mask rows aligned to 8.
        length = -(-(max(map(len, prompts)) + max_new_tokens) // 8) * 8
        tokens = torch.zeros(len(prompts), length, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=model.device)
        finished = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
        cache = FixedCache(model.config, len(prompts), length, model.lm_head.weight)
        return cls(tokens.to(model.device), last, finished, cache)

    def prefill(self, model: Qwen3ForCausalLM, temperature: float) -> None:
        """Run the prompts, including padding, which no prompt attends to, and append a token to every row."""
        width = int(self.last.max()) + 1
        positions = torch.arange(width, device=self.last.device).expand(len(self.last), width)
        hidden = self._forward(model, positions)
        self._append(model, hidden[torch.arange(len(self.last)), self.last], temperature)

    def step(self, model: Qwen3ForCausalLM, temperature: float, stop_ids: Tensor) -> None:
        """Run every row's last token, and append the next one, without waiting for the device."""
        last_tokens = self.tokens.gather(1, self.last[:, None])
        self.finished |= torch.isin(last_tokens[:, 0], stop_ids)
        self._append(model, self._forward(model, self.last[:, None])[:, 0], temperature)

    def _forward(self, model: Qwen3ForCausalLM, positions: Tensor) -> Tensor:
        """Return the hidden states `[batch, rows, hidden]` of the tokens at `positions` `[batch, rows]`."""
        self.cache.positions = positions
        column = torch.arange(self.tokens.shape[1], device=positions.device)
        mask = column <= positions[:, None, :, None]
        return model.model(
            input_ids=self.tokens.gather(1, positions),
            attention_mask={"full_attention": mask},
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state

    def _append(self, model: Qwen3ForCausalLM, hidden: Tensor, temperature: float) -> None:
        logits = model.lm_head(hidden).float()
        if temperature > 0:
            chosen = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1)
        else:
            chosen = logits.argmax(-1, keepdim=True)
        self.last += 1
        self.tokens.scatter_(1, self.last[:, None], chosen)
