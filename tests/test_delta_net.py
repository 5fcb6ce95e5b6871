"""The gated delta net by itself, against transformers' own layer and rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.plan import DeltaNetSizes
from spec_lab.checkpoints.tensor_shapes import delta_net_tensor_shapes
from spec_lab.core.kept import ALL_ROWS, Drop, Kept
from spec_lab.core.passes import Pass
from spec_lab.core.types import AttentionMetadata
from spec_lab.engine.states import SlotStates
from spec_lab.models.delta_net import GatedDeltaNet, build_delta_net
from spec_lab.models.delta_rule import DeltaRows, delta_in_chunks, delta_row_by_row
from tests.kept_states import JUNK, KEPT
from tests.tiny_checkpoints import randomize

HIDDEN = 24
NUM_SLOTS = 3
SIZES = {
    "as_many_heads": DeltaNetSizes(2, 2, 8, 8, 4),
    "grouped": DeltaNetSizes(2, 6, 8, 12, 4),
    "short_kernel": DeltaNetSizes(1, 2, 6, 4, 2),
}


def random_layer(sizes: DeltaNetSizes, seed: int = 0) -> tuple[Any, GatedDeltaNet]:
    """Transformers' layer with every parameter random, and ours around the same weights."""
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=sizes.num_key_heads,
        linear_num_value_heads=sizes.num_value_heads,
        linear_key_head_dim=sizes.key_head_dim,
        linear_value_head_dim=sizes.value_head_dim,
        linear_conv_kernel_dim=sizes.kernel_size,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    layer = Qwen3_5GatedDeltaNet(config, 0).eval()
    randomize(layer, seed)
    tensors = {f"linear_attn.{name}": value.detach() for name, value in layer.state_dict().items()}
    expected = {f"linear_attn.{name}": shape for name, shape in delta_net_tensor_shapes(sizes, HIDDEN).items()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    return layer, build_delta_net(sizes, tensors, "linear_attn.", config.rms_norm_eps)


@dataclass
class Lane:
    """A layer with a cache of `num_rows` states a slot, in which nothing but a cleared slot is finite and small."""

    layer: GatedDeltaNet
    cache: Any
    states: SlotStates

    @classmethod
    def of(
        cls,
        layer: GatedDeltaNet,
        sizes: DeltaNetSizes,
        num_rows: int,
        rollback: str = "checkpoints",
        dtype: torch.dtype = torch.float32,
    ) -> Lane:
        cache = KEPT[rollback](sizes, NUM_SLOTS, num_rows, dtype, torch.device("cpu"))
        own = [value for value in vars(cache).values() if isinstance(value, torch.Tensor)]
        for tensor in (*own, cache.windows.inputs):
            tensor.fill_(JUNK)
        return cls(layer, cache, SlotStates([cache]))

    def prompt(self, slot: int, rows: torch.Tensor) -> torch.Tensor:
        return self.run(rows, len(rows), self.states.of_prompts(torch.tensor([slot])))

    def run(self, rows: torch.Tensor, num_queries: int, recurrent: Any, selection: Any = None) -> torch.Tensor:
        nothing = torch.zeros(0, dtype=torch.int64)
        positions, seq_lens = rows[:, 0], recurrent.slot_ids  # as many as there are rows, and requests
        metadata = AttentionMetadata(positions, nothing, seq_lens, nothing, num_queries, 0, recurrent=recurrent)
        return self.layer.o(self.layer(rows, Pass(self.cache, metadata, selection or ALL_ROWS)))


@torch.inference_mode()
def reference(layer: Any, rows: torch.Tensor) -> torch.Tensor:
    """The outputs of transformers' layer for all of a text's rows at once."""
    outputs = layer(rows.unsqueeze(0))
    return (outputs[0] if isinstance(outputs, tuple) else outputs).squeeze(0)


def random_rows(batch: int, num_rows: int, sizes: DeltaNetSizes, dtype: torch.dtype = torch.float32) -> DeltaRows:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(batch, num_rows, sizes.num_value_heads, *shape, generator=generator, dtype=torch.float64)

    queries, keys = (torch.nn.functional.normalize(draw(sizes.key_head_dim), dim=-1) for _ in range(2))
    rows = (queries, keys, draw(sizes.value_head_dim), -draw().exp(), draw().sigmoid())
    return DeltaRows(*(part.to(dtype) for part in rows))


@pytest.mark.parametrize("num_rows", [1, 3, 64, 65, 150])
def test_chunks_end_where_single_rows_do(num_rows: int) -> None:
    """Both forms of the rule agree with it in float64, from a state that is not zero."""
    sizes = SIZES["grouped"]
    start = torch.randn(2, *sizes.state_shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    exact = list(delta_row_by_row(random_rows(2, num_rows, sizes, torch.float64), start))
    expected = torch.stack([output for output, _ in exact], dim=1).float()
    rows = random_rows(2, num_rows, sizes)
    steps = list(delta_row_by_row(rows, start.float()))
    outputs, states = delta_in_chunks(rows, start.float())
    torch.testing.assert_close(torch.stack([output for output, _ in steps], dim=1), expected, rtol=0, atol=3e-5)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=3e-5)
    for found in (states, steps[-1][1]):
        torch.testing.assert_close(found, exact[-1][1].float(), rtol=0, atol=3e-5)


@pytest.mark.parametrize("rollback", KEPT)
@pytest.mark.parametrize("kind", SIZES)
def test_a_prompt_equals_transformers(kind: str, rollback: str) -> None:
    """In one piece, in chunks, and in chunks of one and two rows, which are fewer than the convolution looks back."""
    sizes = SIZES[kind]
    theirs, ours = random_layer(sizes)
    rows = torch.randn(70, HIDDEN, generator=torch.Generator().manual_seed(3))
    expected = reference(theirs, rows)
    for chunks in ([70], [33, 37], [1, 2, 1, 1, 2, 63], [64, 2, 2, 2]):
        lane = Lane.of(ours, sizes, 4, rollback)
        lane.states.clear(1)
        found = torch.cat([lane.prompt(1, part) for part in rows.split(chunks)])
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5, msg=f"chunks {chunks}")


def test_rows_that_are_dropped_still_reach_the_state() -> None:
    """As in a last layer of which one row is read, or none."""
    sizes = SIZES["grouped"]
    _, ours = random_layer(sizes)
    rows = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(7))
    whole, picked, written = (Lane.of(ours, sizes, num_rows=2) for _ in range(3))
    for lane in (whole, picked, written):
        lane.states.clear(0)
    expected = whole.prompt(0, rows)
    found = picked.run(
        rows, 6, picked.states.of_prompts(torch.tensor([0])), Kept(Drop.AFTER_ATTENTION, torch.tensor([5]))
    )
    nothing, slots = torch.zeros(0, dtype=torch.int64), written.states.of_prompts(torch.tensor([0]))
    metadata = AttentionMetadata(rows[:, 0], nothing, slots.slot_ids, nothing, 6, 0, recurrent=slots)
    ours.write(rows, Pass(written.cache, metadata))
    torch.testing.assert_close(found, expected[5:], rtol=0, atol=1e-6)
    for lane in (picked, written):
        assert torch.equal(lane.cache.states[0, 0], whole.cache.states[0, 0])
        assert torch.equal(lane.cache.windows.inputs[0, :3], whole.cache.windows.inputs[0, :3])


def test_half_precision_keeps_a_float32_state() -> None:
    """The states of a bfloat16 layer have float32's error, not the 2.5e-3 that a bfloat16 state gathers."""
    sizes = SIZES["grouped"]
    theirs, _ = random_layer(sizes)
    names = {name: value.detach() for name, value in theirs.state_dict().items()}
    halves = {n: v if n in ("A_log", "dt_bias") else v.bfloat16() for n, v in names.items()}
    with pytest.raises(AssertionError):
        build_delta_net(sizes, {n: v.bfloat16() for n, v in names.items()}, "", 1e-6)
    layer = build_delta_net(sizes, halves, "", 1e-6)
    lane = Lane.of(layer, sizes, 2, dtype=torch.bfloat16)
    lane.states.clear(0)
    found = lane.prompt(0, torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(8)).bfloat16())
    assert found.dtype == torch.bfloat16 and lane.cache.states.dtype == torch.float32
