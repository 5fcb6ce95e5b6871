"""Every kernel compiles for an H200, on machines without one too: the interpreter accepts what the compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

POINTERS = {"page_table": "*i64", "seq_lens": "*i64", "slot_mapping": "*i64", "positions": "*i64"}
FLOATS = ("sums", "maxima", "partial")


def compile_kernel(kernel: object, dtype: str, num_warps: int = 4, **constants: int | bool) -> str:
    """PTX for compute capability 9.0, aligned as the launchers' tensors are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [parameter.name for parameter in kernel.params]  # type: ignore[attr-defined]
    signature = {}
    for name in names:
        stem = name.removesuffix("_ptr")
        is_partial = stem in FLOATS or (stem == "out" and not constants.get("IS_WHOLE", True))
        pointer = POINTERS.get(stem, "*fp32" if is_partial else f"*{dtype}")
        scalar = "constexpr" if name in constants else "fp32" if name == "scale" else "i32"
        signature[name] = pointer if name.endswith("_ptr") else scalar
    aligned = [(i,) for i, name in enumerate(names) if name.endswith(("_ptr", "_stride"))]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": 2}
    ptx: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return ptx


def compile_attention(dtype: str, num_queries: int, head_dim: int, group: int, is_whole: bool) -> str:
    from spec_kernels import attention

    tiles = attention.choose_tiles(num_queries, head_dim, 4 if dtype == "fp32" else 2)
    return compile_kernel(
        attention._attend_split,
        dtype,
        tiles.num_warps,
        GROUP=group,
        NUM_KV_HEADS=8,
        HEAD_DIM=head_dim,
        CHANNEL_TILE=head_dim,
        PAGE_SIZE=16,
        SPLIT_KEYS=64,
        ROW_TILE=tiles.rows,
        KEY_TILE=tiles.keys,
        IS_WHOLE=is_whole,
    )


def main() -> None:
    from spec_kernels import attention, metadata, rope_write

    decode = compile_attention("bf16", 4, 128, 4, is_whole=False)
    assert "mma.sync" in decode and "cp.async.cg" in decode, "tensor cores, and loads of 16 bytes"
    assert "mma.sync" not in compile_attention("fp32", 4, 128, 4, is_whole=False), "no TF32"
    compile_attention("fp16", 1, 64, 7, is_whole=True)
    compile_attention("bf16", 512, 128, 4, is_whole=True)
    heads = {"HEAD_DIM": 128, "CHANNEL_TILE": 128}
    compile_kernel(attention._merge_splits, "bf16", NUM_HEADS=32, SPLIT_KEYS=64, SPLIT_TILE=16, **heads)
    compile_kernel(rope_write._write_kv, "bf16", NUM_KV_HEADS=8, PAIR_TILE=16, **heads)
    compile_kernel(rope_write._rope_write, "bf16", NUM_HEADS=32, NUM_KV_HEADS=8, HALF=64, HALF_TILE=64, PAIR_TILE=16)
    compile_kernel(metadata._advance, "i64", PAGE_SIZE=16, REQUEST_TILE=128)


@pytest.mark.slow
def test_every_kernel_compiles_for_an_h200() -> None:
    """In a process of its own, where kernels are compiled and not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_kernels_compile"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    main()
