"""Every kernel compiles for an H200, on machines without one too: the interpreter accepts what the compiler refuses."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import pytest

from tests.early_ptx import faults_before_waiting, loads_before_waiting
from tests.machine_code import faults_of

POINTERS = (
    dict.fromkeys(("page_table", "seq_lens", "slot_mapping", "positions", "slot_ids", "slot_seeds", "kv_lens"), "*i64")
    | dict.fromkeys(("tokens", "draft_tokens", "next_tokens", "top_tokens", "window_tokens", "column"), "*i64")
    | dict.fromkeys(("num_emitted", "num_accepted", "num_valid", "rank"), "*i64")
    | dict.fromkeys(("num_drafts", "num_drafted", "limits", "offered"), "*i64")
    | dict.fromkeys(("expert_ids",), "*i64")
    | dict.fromkeys(("top_ids", "num_ahead", "winners", "score_ids", "order", "starts"), "*i32")
    | dict.fromkeys(("sums", "maxima", "partial", "tops", "draft_tops", "draft_sums", "reached"), "*fp32")
    | dict.fromkeys(("routing_weights", "terms", "totals", "scratch"), "*fp32")
    | dict.fromkeys(("probability", "top_probability", "kept_logits", "draft_logits"), "*fp32")
    | dict.fromkeys(("probabilities", "survival", "running"), "*fp32")
    | dict.fromkeys(("scores", "ratios", "rates"), "*fp64")
    | dict.fromkeys(("active", "is_top"), "*i1")
    | dict.fromkeys(("powers",), "*i32")
    | dict.fromkeys(("mixed", "log_decay", "strength", "conv_weight", "rate", "time_bias", "outputs"), "*fp32")
    | dict.fromkeys(("committed",), "*i64")
    | dict.fromkeys(("arrivals",), "*i32")
    | {"token_map": "*i64", "token_ids": "*i64", "chosen": "*i32"}
    | dict.fromkeys(("depths", "path", "path_slots", "slots_before", "came_from", "parents", "prefix_lens"), "*i64")
)
NARROW = {"kv": "*fp8e4nv"}
"""A cache in e4m3, which alone has powers."""
LISTS = {"pieces": 3, "totals": 3}
"""How many tensors stand in a list of them."""
SCALARS = dict.fromkeys(
    (
        *("scale", "scaling", "temperature", "eps", "embedding_eps", "hidden_eps", "next_eps", "cap", "table_scale"),
        *("projected_scale", "threshold", "limit"),
    ),
    "fp32",
)

ANGLES = ("cos", "signed_sin", "slot_mapping")
ENDS = ("seq_lens",)
ENDS_OF_TREES = ("seq_lens", "depths")
"""What a forward is given, and is read before a kernel has waited: only kernels that are launched as ever write it."""

SHARED_BYTES = 227 * 1024
"""Shared memory that a program may have on an H200."""


COMPILED: set[Any] = set()


class Lowered(Exception):
    """A kernel's text in Triton's last form of its own: what follows is not asked for."""


def functions_of(module: ModuleType) -> list[Any]:
    """The Triton functions of a module: kernels, and what they call."""
    from triton.runtime.jit import JITFunction

    own = (each for each in vars(module).values() if isinstance(each, JITFunction))
    return [each for each in own if each.__module__ == module.__name__]


def kernels_of(functions: list[Any]) -> list[Any]:
    """Those that no other one calls."""
    named = ((function.fn.__globals__, name) for function in functions for name in function.fn.__code__.co_names)
    called = {id(space.get(name)) for space, name in named}
    return [function for function in functions if id(function) not in called]


def kernel_of(module: ModuleType, constants: Iterable[str], takes: str) -> Any:
    """Return the kernel of a module that has these constants and the tensor `takes`, if one is named; of two such the
    one of fewer arguments."""
    asked = {name for name in constants if not name.endswith("_ptr")} - {"EARLY"}
    found = []
    for kernel in kernels_of(functions_of(module)):
        own = {parameter.name for parameter in kernel.params if parameter.is_constexpr} - {"EARLY"}
        if own == asked and (not takes or f"{takes}_ptr" in kernel.arg_names):
            found.append(kernel)
    return min(found, key=lambda kernel: len(kernel.params))


def stop_at(_backend: Any, module: Any, *_rest: Any) -> NoReturn:
    raise Lowered(str(module))


def compile_kernel(
    module: ModuleType,
    dtype: str,
    num_warps: int = 4,
    num_stages: int = 2,
    pointers: Mapping[str, str] | None = None,
    ahead: tuple[str, ...] = (),
    given: tuple[str, ...] = (),
    takes: str = "",
    tiles: Mapping[str, tuple[int, int]] | None = None,
    is_lowered: bool = False,
    capability: int = 90,
    **constants: int | bool | None,
) -> str:
    """Compile the kernel of a module that has these constants to PTX for GPUs of a `capability` of ten times the
    version, 90 for 9.0; with `is_lowered` to TTGIR, and no further.
    Its arguments are aligned as the launchers' tensors are, and as the size of most vocabularies is. `pointers` are
    those of other types than usual, `tiles` what the copy engine brings of other tensors.

    One that can be placed early waits before it touches memory, but for what `ahead` names, weights, and for what a
    forward is `given`: that it does load before, and past L1.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.compiler import ASTSource

    kernel = kernel_of(module, constants, takes)
    COMPILED.add(kernel.fn)
    names = [parameter.name for parameter in kernel.params]
    if "powers_ptr" in names and pointers is not NARROW:
        constants = {"powers_ptr": None} | constants
    if "EARLY" in names:
        constants = {"EARLY": True} | constants
    signature = {}
    for name in names:
        stem = name.removesuffix("_ptr")
        pointer = "constexpr" if name in constants else {**POINTERS, **(pointers or {})}.get(stem, f"*{dtype}")
        if stem in LISTS:
            pointer = (pointer,) * LISTS[stem]
        scalar = "constexpr" if name in constants else SCALARS.get(name, "i32")
        signature[name] = pointer if name.endswith("_ptr") else scalar
        if tiles is not None and name in tiles:
            signature[name] = f"tensordesc<{(pointers or {}).get(name, dtype)}{list(tiles[name])}>"
    aligned = [(i,) for i, name in enumerate(names) if name.endswith(("_ptr", "_stride", "vocab_size"))]
    aligned = [place for place in aligned if names[place[0]] not in constants]
    lists = {i: LISTS[name.removesuffix("_ptr")] for i, name in enumerate(names) if name.removesuffix("_ptr") in LISTS}
    aligned = [place for place in aligned if place[0] not in lists]
    aligned += [(i, place) for i, length in lists.items() for place in range(length)]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    target = GPUTarget("cuda", capability, 32)
    if is_lowered:
        stopped, anew = mock.patch.object(CUDABackend, "make_llir", stop_at), triton.knobs.compilation.scope()
        with stopped, anew, pytest.raises(Lowered) as lowered:
            triton.knobs.compilation.always_compile = True  # a cache may hold what was once compiled to its end
            triton.compile(source, target=target, options=options)
        return str(lowered.value)
    result = triton.compile(source, target=target, options=options)
    assert result.metadata.shared <= SHARED_BYTES, "a program fits"
    if "wgmma" in result.asm["ptx"]:
        assert not faults_of(result.asm["cubin"]), "registers that nothing has written, or something else"
    compiled: str = result.asm["ptx"]
    if constants.get("EARLY"):
        arguments = [name for name in names if name not in constants]
        early = tuple(f"{name}_ptr" for name in (*ahead, *given))
        assert not faults_before_waiting(compiled, arguments, early), "it waits first"
        for name in given:
            loads = loads_before_waiting(compiled, arguments, f"{name}_ptr")
            assert loads and all(load.startswith("ld.global.cg") for load in loads), f"{name} does not wait"
    return compiled


def compile_attention(
    dtype: str,
    num_queries: int,
    head_dim: int,
    group: int,
    is_whole: bool,
    is_tree: bool = False,
    num_stages: int | None = None,
    is_lowered: bool = False,
    has_sinks: bool = False,
    pointers: Mapping[str, str] | None = None,
) -> str:
    from spec_kernels import attention_decode
    from spec_kernels.attention_tiles import decode_tiles, tree_tiles

    element_size = 4 if dtype == "fp32" else 1 if pointers is NARROW else 2
    tiles = (tree_tiles if is_tree else decode_tiles)(num_queries * group, head_dim, element_size)
    return compile_kernel(
        attention_decode,
        dtype,
        tiles.num_warps,
        given=ENDS,
        is_lowered=is_lowered,
        pointers=pointers,
        GROUP=group,
        NUM_KV_HEADS=8,
        HEAD_DIM=head_dim,
        CHANNEL_TILE=head_dim,
        PAGE_SIZE=16,
        ROW_TILE=tiles.rows,
        KEY_TILE=tiles.keys,
        STAGES=num_stages or tiles.num_stages,
        IS_TREE=is_tree,
        IS_WHOLE=is_whole,
        HAS_SINKS=has_sinks,
    )


def products_fused_across_threads(ptx: str) -> list[str]:
    """Return the instructions that add a product, unrounded, to what another thread sent: that one, which does the same
    with its own product, comes to a sum with other last bits."""
    sent = set(re.findall(r"shfl\.sync\S*\s+(%r\d+)", ptx))
    return [line for line, added in re.findall(r"(fma\.rn\.f32 .*, (%r\d+));", ptx) if added in sent]


def layouts_of_sums(dtype: str, is_whole: bool, is_tree: bool, pointers: Mapping[str, str] | None = None) -> list[str]:
    """Return how scores [keys, rows] lie in registers where they are added up, which sets the order of additions."""
    text = compile_attention(dtype, 4, 64, 4, is_whole, is_tree, is_lowered=True, pointers=pointers)
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)", text, flags=re.MULTILINE))
    names = re.findall(r"\) : \(tensor<\d+x16xf32, (#\w+)>\) -> tensor<16xf32", text)
    return [layouts[name] for name in names]


def compile_chunk(dtype: str, head_dim: int, is_windowed: bool, pointers: Mapping[str, str] | None = None) -> str:
    from spec_kernels import attention_prompt
    from spec_kernels.attention_tiles import prompt_tiles

    tiles = prompt_tiles(head_dim, 4 if dtype == "fp32" else 2)
    return compile_kernel(
        attention_prompt,
        dtype,
        tiles.num_warps,
        pointers=pointers,
        GROUP=4,
        NUM_KV_HEADS=8,
        HEAD_DIM=head_dim,
        CHANNEL_TILE=head_dim,
        PAGE_SIZE=16,
        ROW_TILE=tiles.rows,
        KEY_TILE=tiles.keys,
        STAGES=tiles.num_stages,
        IS_WINDOWED=is_windowed,
        HAS_SINKS=is_windowed,
    )


def compile_vocabulary() -> None:
    """Compile the kernels over a vocabulary of 152k tokens, for N = 4."""
    from spec_kernels import gumbel, rejection, relaxed, softmax, strict, synthetic

    merge = {"ROW_TILE": 4, "TILE_TILE": 64}
    for dtype in ("bf16", "fp32"):
        tops = compile_kernel(strict, dtype, VOCAB_TILE=4096)
        assert "ld.global.v4" in tops, "logits in loads of 16 bytes, where 16 divides the vocabulary's size"
        compile_kernel(relaxed, dtype, VOCAB_TILE=4096)
        compile_kernel(softmax, dtype, VOCAB_TILE=4096)
        compile_kernel(gumbel, dtype, RACE_TILE=1024)
        compile_kernel(gumbel, dtype, kept_logits_ptr=None, column_ptr=None, RACE_TILE=1024)
        kind = {"IS_SAMPLED": dtype == "fp32", "ALL_OFFERED": dtype == "bf16"}
        compile_kernel(rejection, dtype, **kind, **merge)
        compile_kernel(rejection, dtype, RACE_TILE=1024, **kind)
    for offered in (False, True):
        compile_kernel(strict, "i64", ALL_OFFERED=offered, **merge)
        compile_kernel(synthetic, "i64", ALL_OFFERED=offered, **merge)
    compile_kernel(relaxed, "i64", TILE_TILE=64)
    compile_kernel(gumbel, "i64", TILE_TILE=256)
    compile_kernel(rejection, "i64", TILE_TILE=256)


def compile_draft_kernels() -> None:
    from spec_kernels import draft_step, mtp_window

    step = compile_kernel(draft_step, "bf16", HIDDEN_SIZE=4096, CHANNEL_TILE=1024)
    assert "ld.global.v4" in step, "hidden states in loads of 16 bytes"
    for row_tile, channel_tile in ((1, 2048), (4, 512), (8, 256)):
        tiles = {"ROW_TILE": row_tile, "CHANNEL_TILE": channel_tile}
        slide = compile_kernel(mtp_window, "bf16", HIDDEN_SIZE=4096, **tiles)
        read, barrier, written = slide.rfind("ld.global"), slide.find("bar.sync"), slide.find("st.global")
        assert 0 < read < barrier < written, "in place: a window is read, then all threads meet, then it is written"


def compile_confidence() -> None:
    """Compile it for K = 5 and 64 requests."""
    from spec_kernels import confidence

    for is_first in (False, True):
        compile_kernel(confidence, "i64", IS_FIRST=is_first, REQUEST_TILE=64)
    compile_kernel(confidence, "i64", REQUEST_TILE=64)


def compile_stops() -> None:
    """Compile it for N = 4 and three ends of sequence, with and without tokens accepted unseen."""
    from spec_kernels import stops

    for only_last in (False, True):
        compile_kernel(stops, "i64", ROW_TILE=4, END_TILE=4, ONLY_LAST=only_last)


def compile_lookup() -> None:
    """Compile it for N = 4, K = 3 and texts longer than a tile."""
    from spec_kernels import lookup

    tiles = {"MAX_NGRAM": 4, "TOKEN_TILE": 4, "DRAFT_TILE": 4, "PLACE_TILE": 2048}
    compile_kernel(lookup, "i64", 8, pointers={"starts": "*i64"}, **tiles)


def compile_trees() -> None:
    """Compile the steps of a tree of 16 rows, three levels deep."""
    from spec_kernels import tree_grow, tree_path, tree_rank, tree_walk

    for dtype, tile in (("bf16", 1024), ("fp32", 4096)):
        ranks = compile_kernel(tree_rank, dtype, pointers={"order": "*i64"}, TOPK=4, VOCAB_TILE=tile)
        assert "ld.global.v4" in ranks, "logits in loads of 16 bytes, where 16 divides the vocabulary's size"
    merge = {"MAPPED": True, "TOPK": 4, "TILE_TILE": 32, "PLACE_TILE": 128}
    compile_kernel(tree_rank, "fp32", 1, pointers={"order": "*i64"}, **merge)
    numbers = ("pool_tokens", "pool_parents", "branch_tokens", "came_from", "numbers", "found_tokens", "numbers_before")
    pool = dict.fromkeys(numbers, "*i64") | {"row_of": "*i32"}
    scores = ("pool_scores", "branch_scores", "log_probs", "scores_before")
    pool |= dict.fromkeys(scores, "*fp32")
    for is_first in (False, True):
        found = {"IS_FIRST": is_first, "TOPK": 4}
        branches = {"BRANCH_TILE": 4, "FOUND_TILE": 4 if is_first else 16, "CHUNK": 1024}
        level = compile_kernel(tree_grow, "bf16", pointers=pool, **found, **branches)
        assert "ld.global.v4" in level and "st.global.v4" in level, "hidden states in loads and stores of 16 bytes"
        compile_kernel(tree_grow, "bf16", pointers=pool, TILE=1024, COUNTED=False, **found)
        rows = compile_kernel(tree_grow, "bf16", pointers=pool, TILE=64, COUNTED=True, **found)
        between = rows[rows.find("st.global") : rows.find("ld.global.cg")]
        assert is_first or "bar.sync" in between, "the row of a parent is read when all are written"
    tiles = {"ROW_TILE": 16, "TILE_TILE": 32, "COLUMN_TILE": 4}
    for is_chosen in (False, True):
        of = {"chosen": "*i64" if is_chosen else "*i32"}
        compile_kernel(tree_walk, "fp32", 1, pointers=of, IS_CHOSEN=is_chosen, **tiles)
    compile_kernel(tree_walk, "fp32", 1, pointers={"rates": "*fp64"}, RATE_TILE=4, **tiles)
    moves = compile_kernel(tree_path, "bf16", PAGE_SIZE=16, COLUMN_TILE=4, CHUNK=1024)
    kept = moves[: moves.find("bar.sync")], moves[moves.find("bar.sync") :]
    assert "ld.global.v4" in kept[0] and "st.global.v4" not in kept[0], "all is read before any is written"


def compile_experts() -> None:
    """Compile the products of Qwen3-30B-A3B's experts, for few rows and for many, with the most shared memory, and with
    weights of 4 bits."""
    from spec_kernels import experts, routing
    from spec_kernels.expert_tiles import choose_expert_tiles

    cases = ((17, 1, "bf16"), (512, 32, "bf16"), (8192, 512, "bf16"), (8192, 512, "fp32"))
    narrow = ((1, 16, "bf16", 32, "*u32"), (64, 16, "bf16", 32, "*u32"), (64, 16, "bf16", 128, "*i32"))
    for num_rows, pairs_each, dtype, group, kind in (*((*case, 0, "*bf16") for case in cases), *narrow):
        tiles = choose_expert_tiles(num_rows, pairs_each, 4 if dtype == "fp32" else 2, is_narrow=group > 0)
        both = {"PAIR_TILE": tiles.pairs, "NUM_EXPERTS": 128, "EXPERT_TILE": 128, "NUM_CHOSEN": 8}
        both |= {"SCALED": -group, "IS_GELU": False, "IS_CLAMPED": group > 0}
        pointers = {"scales": kind, "weights": "i16" if group else dtype}
        for is_gated in (False,) if num_rows == 512 else (True, False):
            product, sizes = (tiles.gate_up, (2048, 768)) if is_gated else (tiles.down, (768, 2048))
            shape = {"COLUMN_TILE": product.columns, "CHANNEL_TILE": product.channels, "GATED": is_gated}
            shape |= {"CHANNELS": sizes[0], "COLUMNS": sizes[1]}
            width = product.channels // (4 if group else 1)
            brought = {"weights": (product.columns, width), "inner": (tiles.pairs, product.channels)}
            how = {"num_stages": product.num_stages, "num_warps": product.num_warps, "tiles": brought}
            out = {"out": "*fp32" if num_rows < 256 and not is_gated else f"*{dtype}"}
            ptx = compile_kernel(experts, dtype, pointers=pointers | out, **how, **both, **shape)
            if dtype == "bf16":
                assert "wgmma" in ptx and "cp.async.bulk.tensor" in ptx, "Hopper's products and copies"
                assert not group or "cp.async.ca" in ptx, "scales are fetched ahead too"
            else:
                assert "mma." not in ptx, "no TF32"
    compile_kernel(experts, "i32", PAIR_TILE=1024, NO_EXPERT=1 << 30)
    compile_kernel(experts, "bf16", NUM_CHOSEN=8, HIDDEN=2048, CHANNEL_TILE=512, HAS_RESIDUAL=True)
    choice = {"NUM_EXPERTS": 256, "EXPERT_TILE": 256, "NUM_CHOSEN": 8, "IS_RENORMALIZED": True}
    in_groups = {"IS_SIGMOID": True, "HAS_BIAS": True, "NUM_GROUPS": 8, "NUM_CHOSEN_GROUPS": 4}
    compile_kernel(routing, "fp32", 2, **choice, **in_groups)
    of_all = {"IS_SIGMOID": False, "HAS_BIAS": False, "NUM_GROUPS": 1, "NUM_CHOSEN_GROUPS": 4}
    rows = {"HIDDEN": 2048, "HIDDEN_TILE": 2048, "NORMED": True, "AT_ONCE": 4}
    assert "ld.global.v4" in compile_kernel(routing, "bf16", 1, ahead=("gate", "norm"), **rows, **choice, **of_all)


def compile_few_experts() -> None:
    """Compile them for GLM-4.7-Flash, whose shared expert is one more."""
    from spec_kernels import few_experts
    from spec_kernels.expert_tiles import choose_expert_tiles

    tiles = choose_expert_tiles(1, 1, 2)
    inner = {
        "INNER_COLUMNS": tiles.gate_up.columns,
        "INNER_CHANNELS": tiles.gate_up.channels,
        "INNER_STAGES": tiles.gate_up.num_stages,
    }
    outer = {
        "COLUMN_TILE": tiles.down.columns,
        "CHANNEL_TILE": tiles.down.channels,
        "STAGES": tiles.down.num_stages,
    }
    for has_gate_up, has_down in ((True, True), (True, False), (False, True)):
        ptx = compile_kernel(
            few_experts,
            "bf16",
            tiles.down.num_warps,
            ROW_TILE=16,
            NUM_CHOSEN=4,
            CHOICE_TILE=4,
            NUM_EXPERTS=64,
            EXPERT_TILE=128,
            HIDDEN=2048,
            INNER=1536,
            IS_GELU=False,
            HAS_SHARED=True,
            HAS_RESIDUAL=True,
            HAS_GATE_UP=has_gate_up,
            HAS_DOWN=has_down,
            **inner,
            **outer,
        )
        assert "mma" in ptx and "cp.async.cg" in ptx, "loads of 16 bytes, whichever weight a program reads"
        assert ("ld.global.gpu.acquire" in ptx) == (has_gate_up and has_down), "who waits does not write"
        assert ("trap;" in ptx) == (has_gate_up and has_down), "no wait is without end"


def compile_latent_attention() -> None:
    """Compile it at the sizes of GLM-4.7-Flash and DeepSeek-V3."""
    from spec_kernels import head_products, latent_attention, latent_merge, latent_rows
    from spec_kernels.attention_tiles import choose_latent_tiles

    for num_heads, is_whole in ((16, True), (20, False), (20, True), (128, False), (128, True)):
        tiles = choose_latent_tiles(num_heads, 2)
        ptx = compile_kernel(
            latent_attention,
            "bf16",
            tiles.num_warps,
            given=ENDS,
            NUM_HEADS=num_heads,
            RANK=512,
            ROW_WIDTH=576,
            RANK_TILE=512,
            ROTATED_TILE=64,
            PAGE_SIZE=16,
            ROW_TILE=tiles.rows,
            KEY_TILE=tiles.keys,
            STAGES=tiles.num_stages,
            IS_WHOLE=is_whole,
        )
        products = ptx[ptx.rindex("cp.async.cg") :].count("wgmma.mma_async")
        assert products == 576 // 16, "the next tile is asked for before the products of scores"
    merged = {"NUM_HEADS": 20, "RANK": 512, "SPLIT_TILE": 32, "CHANNEL_TILE": 128}
    compile_kernel(latent_merge, "bf16", given=ENDS, **merged)
    halves = {"HALF": 32, "HALF_TILE": 32}
    compile_kernel(latent_rows, "bf16", RANK=512, RANK_TILE=512, **halves)
    compile_kernel(latent_rows, "bf16", NUM_HEADS=20, HEAD_TILE=16, **halves)
    tiles_of_heads = {"ROW_TILE": 16, "COLUMN_TILE": 64, "CHANNEL_TILE": 64}
    sizes = {"IN": 192, "OUT": 512, "OUT_TILE": 512, **tiles_of_heads, **halves}
    for rest in (dict.fromkeys(("cache_ptr", "projected_ptr", "norm_weight_ptr", "slot_mapping_ptr")), {}):
        for ahead in (False, True):
            maps = ("maps",) if ahead else ()
            ptx = compile_kernel(head_products, "bf16", ahead=maps, AHEAD=ahead, **sizes, **rest)
            assert "mma" in ptx and ("cp.async.cg" in ptx) != ahead, "maps come in a pipeline, or all before it waits"


def compile_delta_net() -> None:
    """Compile the kernels of a gated delta net of Qwen3.5-9B's sizes."""
    from spec_kernels import delta_chunks, delta_inputs, delta_kept, delta_rule, gated_norm

    heads = {"NUM_KEY_HEADS": 16, "NUM_VALUE_HEADS": 32, "KEY_DIM": 128, "VALUE_DIM": 128}
    for is_prompt in (False, True):
        tiles = {"CHANNEL_TILE": 128, "HEAD_TILE": 32, "HISTORY": 3, "HISTORY_TILE": 4, "ROW_TILE": 16}
        slide = compile_kernel(delta_inputs, "bf16", IS_PROMPT=is_prompt, **heads, **tiles)
        behind = slide[slide.rfind("bar.sync") :]
        assert 0 < behind.find("st.global") < behind.find("ld.global"), "all threads have read when a window is written"
    tiles = {"KEY_TILE": 128, "VALUE_TILE": delta_rule.VALUE_TILE}
    ptx = compile_kernel(delta_rule, "fp32", delta_rule.NUM_WARPS, **tiles, **heads)
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx, "states in loads and stores of 16 bytes"
    chunks = {"KEY_TILE": 128, "CHUNK": delta_chunks.CHUNK}
    ptx = compile_kernel(delta_chunks, "fp32", delta_chunks.SYSTEM_WARPS, **chunks, **heads)
    assert "mma" in ptx, "tensor cores"
    chunks["VALUE_TILE"] = delta_chunks.VALUE_TILE
    ptx = compile_kernel(delta_chunks, "fp32", delta_chunks.CHUNK_WARPS, **chunks, **heads)
    assert "mma" in ptx, "tensor cores"
    sizes = {"KEY_SIZE": 2048, "VALUE_SIZE": 4096, "NUM_VALUE_HEADS": 32}
    compile_kernel(delta_kept, "fp32", HEAD_TILE=32, CHANNEL_TILE=1024, **sizes)
    compile_kernel(gated_norm, "bf16", NUM_HEADS=32, HEAD_DIM=128, PAIR_TILE=4, CHANNEL_TILE=128)


def compile_product(dtype: str, rows: int, columns: int, splits: int, **constants: int | bool) -> str:
    from spec_kernels import product

    options = dict.fromkeys(
        ("TURNED", "NORMED", "GATED", "IS_GELU", "HAS_BIAS", "HAS_MULTIPLIED", "HAS_RESIDUAL"), False
    )
    sizes = {"IN_FEATURES": 4096, "SPLITS": splits, "ROW_TILE": rows, "COLUMN_TILE": columns, "DEPTH": 128}
    options |= {"SCALED": 0, "AHEAD": False, "GROUPS": 0, "REST": 0, **constants}
    both = {**sizes, **options}
    ahead = ("weight", "norm") if both["AHEAD"] or both["GROUPS"] else ()
    return compile_kernel(product, dtype, ahead=ahead, STAGES=3, WHOLE_TILES=True, **both)


def compile_narrow_products() -> None:
    """Compile products with a weight of 8 and of 4 bits, and what widens such a weight for the library."""
    from spec_kernels import product, widen

    sizes_of_widen = {"IN_FEATURES": 4096, "ROW_TILE": widen.ROWS_OF_PROGRAM}
    pairs = {"weight": "*i16", "scales": "*fp32"}
    sizes = {"IN_FEATURES": 4096, "SPLITS": 1, "ROW_TILE": 16, "COLUMN_TILE": 64, "DEPTH": 128, "STAGES": 4}
    sizes |= {"GROUPS": 0, "REST": 0}
    options = {"TURNED": True, "WHOLE_TILES": True, "SCALED": 128, "NORMED": True, "GATED": True}
    rest = dict.fromkeys(("HAS_BIAS", "HAS_MULTIPLIED", "IS_GELU", "AHEAD", "HAS_RESIDUAL"), False)
    ptx = compile_kernel(product, "bf16", 4, pointers=pairs, **sizes, **options, **rest)
    assert "wgmma" in ptx and "cp.async.cg" in ptx, "tensor cores, and loads of 16 bytes"
    assert "ldmatrix" in ptx, "pairs go straight to registers"
    assert ptx.count("0x87f087f0") == 32, "an instruction for two numbers"
    for group, kind in ((128, "*i32"), (32, "*i32"), (32, "*u32")):
        pointers = {"weight": "*i16", "scales": kind}
        ptx = compile_kernel(product, "bf16", 4, pointers=pointers, **sizes, **options | {"SCALED": -group}, **rest)
        assert "wgmma" in ptx and "ldmatrix" in ptx, "tensor cores, and words go straight to registers"
        assert "cp.async.ca" in ptx, "scales are fetched ahead"
        for capability in (80, 90):
            compile_kernel(widen, "bf16", 4, pointers=pointers, SCALED=-group, capability=capability, **sizes_of_widen)
    compile_kernel(widen, "bf16", 4, pointers=pairs, SCALED=128, **sizes_of_widen)
    compile_kernel(widen, "fp16", 4, pointers=pairs, SCALED=128, **sizes_of_widen)


def compile_project_heads() -> None:
    from spec_kernels import project_heads

    tiles = {"IN_FEATURES": 4096, "SPLITS": 2, "ROW_TILE": 16, "COLUMN_TILE": 64, "DEPTH": 128, "STAGES": 4}
    tiles |= {"GROUPS": 0, "REST": 0}
    heads = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64}
    normed = {"TURNED": True, "WHOLE_TILES": True, "SCALED": 0, "NORMED": True, "HAS_BIAS": False}
    ptx = compile_kernel(project_heads, "bf16", 4, **tiles, **heads, **normed)
    assert "wgmma" in ptx and "cp.async.cg" in ptx, "tensor cores, and loads of 16 bytes"
    pairs = {"weight": "*i16", "scales": "*fp32"}
    modes = normed | {"SCALED": 128, "NORMED": False, "HAS_BIAS": True}
    ptx = compile_kernel(project_heads, "bf16", 4, pointers=pairs, **tiles, **heads, **modes)
    assert "wgmma" in ptx and "ldmatrix" in ptx, "pairs go straight to registers"


def compile_products() -> None:
    from spec_kernels import draft_input, gate, gated_share, likeliest, norms

    gated = compile_product("bf16", 16, 32, 1, NORMED=True, GATED=True)
    assert "mma.sync" in gated and "cp.async.cg" in gated
    assert "atom" not in gated, "one split asks nobody"
    ends = {"IS_GELU": True, "HAS_MULTIPLIED": True, "HAS_RESIDUAL": True}
    assert "wgmma" in compile_product("fp16", 16, 64, 2, TURNED=True, **ends), "weights from shared memory"
    assert "mma." not in compile_product("fp32", 16, 16, 2, HAS_BIAS=True), "no TF32"
    compile_project_heads()
    small = {"IN_FEATURES": 576, "DEPTH": 512, "REST": 64, "GROUPS": 4}
    at_once = compile_product("bf16", 16, 8, 1, NORMED=True, GATED=True, **small)
    assert at_once.rindex("evict_first") < at_once.index("griddepcontrol.wait"), "weights do not wait"
    assert "mma.sync" in at_once
    ahead = compile_product("bf16", 16, 64, 4, TURNED=True, NORMED=True, AHEAD=True, IN_FEATURES=2560)
    waits = ahead.index("griddepcontrol.wait")
    assert ahead.index("st.shared") < waits < ahead.index("wgmma.mma"), "weights do not wait"
    tiles = {"IN_FEATURES": 4096, "ROW_TILE": 16, "COLUMN_TILE": 32, "DEPTH": 128, "STAGES": 3, "MERGE_TILE": 128}
    modes = {"TURNED": False, "WHOLE_TILES": True, "NORMED": True, "MAPPED": True}
    compile_kernel(likeliest, "bf16", WEIGHED=False, **tiles, **modes)
    small = {"IN_FEATURES": 40, "ROW_TILE": 32, "COLUMN_TILE": 16, "DEPTH": 16, "STAGES": 4, "MERGE_TILE": 2}
    weighed_alone = modes | {"WHOLE_TILES": False, "MAPPED": False, "WEIGHED": True}
    found = compile_kernel(likeliest, "fp32", **small, **weighed_alone)
    assert not products_fused_across_threads(found), "all threads that hold a row's probability have the same one"
    compile_kernel(draft_input, "bf16", 8, SIZE=4096, SIZE_TILE=4096)
    compile_kernel(norms, "bf16", 8, SIZE=4096, SIZE_TILE=4096)
    only_next = {"weight_ptr": None, "scale_ptr": None, "SIZE": 4096, "SIZE_TILE": 4096}
    compile_kernel(norms, "bf16", 8, ahead=("next_weight",), takes="added", **only_next)
    compile_kernel(gated_share, "bf16", 8, SIZE=2048, SIZE_TILE=2048)
    for is_gelu in (False, True):
        compile_kernel(gate, "bf16", TILE=1024, IS_GELU=is_gelu)


def compile_gemma4() -> None:
    """Compile what Gemma 4's layers have beside those of other families, at the sizes of E4B."""
    from spec_kernels import clusters, layer_embedding, norms, rope_write, softcap

    for without in ("scale", "next_weight"):
        ending = {f"{without}_ptr": None, "SIZE": 2560, "SIZE_TILE": 4096}
        compile_kernel(norms, "bf16", 8, ahead=("weight", "next_weight", "scale"), takes="added", **ending)
    tiles = {"NUM_LAYERS": 42, "WIDTH": 256, "WIDTH_TILE": 256}
    compile_kernel(layer_embedding, "bf16", 1, **tiles)
    compile_kernel(softcap, "bf16", TILE=2048)
    choice = {"NUM_CLUSTERS": 2048, "NUM_CHOSEN": 32, "CLUSTER_TILE": 16, "OTHERS_TILE": 512}
    compile_kernel(clusters, "bf16", **choice)
    sizes = {"HIDDEN": 256, "SIZE": 128, "SIZE_TILE": 128, "NUM_CHOSEN": 32, "CHOSEN_TILE": 32, "CHANNEL_TILE": 256}
    compile_kernel(clusters, "bf16", 8, **sizes)
    head = {"HALF": 128, "HALF_TILE": 128, "REST": 0, "REST_TILE": 1, "PAIR_TILE": 8, "NORMED": True}
    for num_kv_heads, keys_are_values in ((2, False), (4, True), (0, False)):
        of_values = {"NORMS_VALUES": num_kv_heads > 0, "KEYS_ARE_VALUES": keys_are_values}
        sizes = {"NUM_HEADS": 8, "NUM_KV_HEADS": num_kv_heads, **head, **of_values}
        compile_kernel(rope_write, "bf16", ahead=("norm",), given=ANGLES if num_kv_heads else ANGLES[:2], **sizes)


def main() -> None:
    import triton

    import spec_kernels
    from spec_kernels import merge_pieces, metadata, rope_write, split_merge, tree_metadata

    if triton.knobs.nvidia.ptxas.version == "12.8":
        with pytest.raises(AssertionError, match="registers"):
            compile_attention("bf16", 4, 128, 4, is_whole=False, num_stages=1)
    decode = compile_attention("bf16", 4, 128, 4, is_whole=False)
    assert "wgmma.mma_async" in decode and "cp.async.cg" in decode, "tensor cores, and loads of 16 bytes"
    both = (False, True), (True, False)
    for dtype, pointers, forms in (("bf16", None, both), ("bf16", NARROW, both), ("fp32", None, ((True, True),))):
        plain = layouts_of_sums(dtype, False, False, pointers)
        assert len(plain) == 2, "of its maximum and of its sum"
        assert all(layouts_of_sums(dtype, *form, pointers) == plain for form in forms), "a row's bits are of no form"
    assert "mma." not in compile_attention("fp32", 4, 64, 4, is_whole=False), "no TF32"
    tree = compile_attention("bf16", 16, 128, 4, is_whole=True, is_tree=True)
    assert "wgmma.mma_async" in tree and "cp.async.cg" in tree, "a tree's keys are read as a chain's are"
    compile_kernel(tree_metadata, "bf16", 1, PAGE_SIZE=16, ROW_TILE=16)
    compile_kernel(tree_metadata, "bf16", 1, PAGE_SIZE=16, ROW_TILE=4, PLACE_TILE=4)
    compile_attention("fp16", 4, 512, 7, is_whole=True, has_sinks=True)
    merge = {"NUM_HEADS": 32, "HEAD_DIM": 128, "HEAD_TILE": 4, "CHANNEL_TILE": 128}
    merge |= {"STAGES": split_merge.STAGES}
    wide = merge | {"NUM_HEADS": 16, "HEAD_DIM": 512, "CHANNEL_TILE": 512}
    compile_kernel(split_merge, "bf16", 8, given=ENDS, IS_TREE=False, IS_WHOLE=False, HAS_SINKS=False, **wide)
    compile_kernel(split_merge, "bf16", given=ENDS_OF_TREES, IS_TREE=True, IS_WHOLE=True, HAS_SINKS=True, **merge)
    pieces = {"NUM_HEADS": 32, "HEAD_DIM": 128, "ROW_TILE": 16, "CHANNEL_TILE": 128}
    assert "ld.global.v4" in compile_kernel(merge_pieces, "bf16", **pieces), "in loads of 16 bytes"
    chunk = compile_chunk("bf16", 64, is_windowed=False)
    assert "wgmma.mma_async" in chunk and "cp.async.cg" in chunk, "Hopper's tensor core products"
    compile_chunk("bf16", 512, is_windowed=True)
    for is_tree in (False, True):
        narrow = compile_attention("bf16", 16, 128, 4, is_whole=is_tree, is_tree=is_tree, pointers=NARROW)
        assert all(has in narrow for has in (".f32.e4m3.e4m3", "cp.async.cg", ".trans")), "turned as words, by ldmatrix"
    compile_attention("fp16", 4, 256, 7, is_whole=True, has_sinks=True, pointers=NARROW)
    compile_chunk("bf16", 128, is_windowed=False, pointers=NARROW)
    heads = {"HEAD_DIM": 128, "CHANNEL_TILE": 128}
    compile_kernel(rope_write, "bf16", NUM_KV_HEADS=8, PAIR_TILE=16, **heads)
    for normed, still in ((False, {"REST": 0, "REST_TILE": 1}), (True, {"REST": 192, "REST_TILE": 256})):
        sizes = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64, "HALF_TILE": 64, "PAIR_TILE": 16}
        options = {"NORMED": normed, **sizes, **still, "NORMS_VALUES": False, "KEYS_ARE_VALUES": False}
        compile_kernel(rope_write, "bf16", ahead=("norm",), given=ANGLES, **options)
    compile_kernel(rope_write, "bf16", ahead=("norm",), given=ANGLES, pointers=NARROW, **options)
    compile_kernel(rope_write, "bf16", pointers=NARROW, NUM_KV_HEADS=8, PAIR_TILE=16, **heads)
    turned = compile_kernel(rope_write, "fp32", is_lowered=True, **options)
    assert turned.count("math.fma") == 2, "which product is fused is written down, as in project_heads"
    compile_kernel(metadata, "i64", PAGE_SIZE=16, ROW_TILE=128)
    compile_kernel(metadata, "i64", positions_ptr=None, PAGE_SIZE=16, ROW_TILE=128)
    compile_vocabulary()
    compile_draft_kernels()
    compile_stops()
    compile_lookup()
    compile_trees()
    compile_confidence()
    compile_experts()
    compile_few_experts()
    compile_latent_attention()
    compile_delta_net()
    compile_products()
    compile_gemma4()
    compile_narrow_products()
    names = (module.name for module in pkgutil.iter_modules(spec_kernels.__path__, "spec_kernels."))
    functions = [each for name in names for each in functions_of(importlib.import_module(name))]
    assert {kernel.fn for kernel in kernels_of(functions)} == COMPILED


def test_every_kernel_compiles_for_an_h200() -> None:
    """It runs in a process of its own, where kernels are compiled and not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_kernels_compile"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    main()
