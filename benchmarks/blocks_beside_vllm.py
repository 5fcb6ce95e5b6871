"""Compares the drafts of block drafters with those that vLLM 0.26 makes from the same files, in each layout that it
reads.

    python benchmarks/blocks_beside_vllm.py ours FOLDER              writes the checkpoints, and decodes with the lab
    python benchmarks/blocks_beside_vllm.py theirs FOLDER NAME       decodes with vLLM, which must be importable
    python benchmarks/blocks_beside_vllm.py compare FOLDER           the table

The target and the drafters are `pocket`'s, in float32, decoding greedily. Both sides read the same files. A round is
identified by the number of tokens before it. Rounds are compared if both texts are the same up to there. `theirs` does
not import spec_lab. It needs a GPU machine with `FOLDER` and vLLM (`../shared/peer/`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NUM_DRAFTS, NUM_PROMPTS, NUM_TOKENS = 7, 9, 64
OURS, THEIRS = "ours.json", "theirs.json"
ZOO = Path(__file__).parents[1] / "spec_lab" / "zoo"


@dataclass(frozen=True)
class Case:
    """A drafter in one layout.

    Attributes:
        drafter: the lab's knobs.
        method: vLLM's name for it.
        window: attention window of all layers, in tokens; None for full attention.
        whole_block: whether a row sees later rows of its block. Without a window it always does.
        draft_vocab: number of tokens that can be drafted; None for all.
    """

    shipped: str
    layout: str
    drafter: tuple[str, ...]
    method: str
    window: int | None = None
    whole_block: bool = True
    markov: bool = False
    draft_vocab: int | None = None


CASES = {
    "dflash-zlab": Case("pocket-dflash", "zlab", ("drafter=dflash",), "dflash"),
    "dflash-speculators": Case("pocket-dflash", "speculators", ("drafter=dflash",), "dflash", draft_vocab=3072),
    "dspark-deepspec": Case("pocket-dspark", "deepspec", ("drafter=dspark",), "dspark"),
    "dspark-speculators": Case(
        "pocket-dflash",
        "speculators",
        ("drafter=dflash", "drafter.head=markov"),
        "dspark",
        markov=True,
        draft_vocab=3072,
    ),
    "p_eagle-speculators": Case("pocket-p_eagle", "speculators", ("drafter=p_eagle",), "eagle3"),
    "dflash-window": Case("pocket-dflash", "zlab", ("drafter=dflash",), "dflash", window=16),
    "dflash-causal-window": Case(
        "pocket-dflash", "speculators", ("drafter=dflash",), "dflash", window=16, whole_block=False
    ),
}


@dataclass(frozen=True)
class Decoded:
    """The tokens after a prompt, and the drafts of each round, by the number of these tokens before the round."""

    tokens: list[int]
    drafts: dict[int, list[int]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the three steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("ours", "theirs", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="of the cases (default: all); theirs takes one at a time")
    options = parser.parse_args(arguments)
    names = options.names or list(CASES)
    if options.step == "compare":
        print(table(options.folder, names))
        return 0
    decode = ours if options.step == "ours" else theirs
    for name in names:
        decode(options.folder, name)
    return 0


def ours(folder: Path, name: str) -> None:
    """Write the files of a case, and decode with the lab on the CPU."""
    import spec_lab
    from spec_lab.record.verify_rows import load_verify_rows

    case = CASES[name]
    target = write_target(folder / "target")
    write_drafter(folder / name, case, target)
    composed = spec_lab.compose(
        [
            *("target=hf", f"target.path={target}", *case.drafter, f"drafter.path={folder / name}"),
            *(f"drafter.num_draft_tokens={NUM_DRAFTS}", f"max_new_tokens={NUM_TOKENS}"),
            *("workload=pocket", f"workload.limit={NUM_PROMPTS}"),
            *("dtype=float32", "repeats=1", "profile_rounds=0", "record.topk=1", f"output_dir={folder}/runs/{name}"),
        ]
    )
    result = spec_lab.run(composed)
    rows = load_verify_rows(result.folder)
    assert rows is not None
    first, texts, prompts = 0, [], []
    for request, num_rounds in zip(result.requests, rows.num_rounds.tolist(), strict=True):
        rounds = slice(first, first := first + num_rounds)
        starts = [1]
        for accepted in rows.accepted[rounds].tolist():
            starts.append(starts[-1] + accepted + 1)
        drafts = dict(zip(starts, rows.draft_ids[rounds].tolist(), strict=False))
        texts.append({"tokens": request["output_ids"], "drafts": drafts})
        prompts.append(request["prompt_ids"])
    (folder / name / OURS).write_text(json.dumps({"prompts": prompts, "texts": texts}))


def write_target(folder: Path) -> Path:
    """Copy the shipped target."""
    if not folder.exists():
        shutil.copytree(ZOO / "pocket", folder)
    return folder


def write_drafter(folder: Path, case: Case, target: Path) -> None:
    """Write a shipped drafter in the layout of a case, with the parts that the case adds."""
    import torch
    from safetensors.torch import load_file, save_file

    from spec_lab.checkpoints.block_checkpoint import load_block
    from spec_lab.checkpoints.block_config import Causality
    from spec_lab.checkpoints.block_heads import MarkovForm, MarkovSizes
    from spec_lab.checkpoints.block_layouts import DEEPSPEC, SPECULATORS, ZLAB
    from spec_lab.checkpoints.block_writing import write_block
    from spec_lab.checkpoints.eagle3_checkpoint import load_eagle3
    from spec_lab.checkpoints.families.table import read_model_config

    shipped, model = ZOO / case.shipped, read_model_config(target)
    if case.method == "eagle3":
        config_json = json.loads((shipped / "config.json").read_text())
        del config_json["quantization_config"]
        _, tensors = load_eagle3(shipped, model, torch.float32, "cpu", "peagle")
        folder.mkdir(parents=True, exist_ok=True)
        named = {key.replace("midlayer.", "layers.0."): narrow(tensor) for key, tensor in tensors.items()}
        save_file(named, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config_json))
        return
    config, tensors = load_block(shipped, model, torch.float32, "cpu")
    head = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(0)
    if case.draft_vocab is not None:
        kept = torch.randperm(model.vocab_size, generator=generator)[: case.draft_vocab].sort().values
        t2d = torch.zeros(model.vocab_size, dtype=torch.bool)
        t2d[kept] = True
        tensors |= {"d2t": kept - torch.arange(len(kept)), "t2d": t2d, "lm_head.weight": head[kept].clone()}
        config = replace(config, draft_vocab_size=case.draft_vocab)
    if case.markov:
        config = replace(config, head=MarkovSizes(16, MarkovForm.vanilla))
        for table, size in (("w1", model.vocab_size), ("w2", config.draft_vocab_size)):
            tensors[f"markov_head.markov_{table}.weight"] = torch.randn(size, 16, generator=generator) * 0.5
    if case.window is not None:
        layers = tuple(replace(layer, window=case.window) for layer in config.body.layers)
        causality = Causality.none if case.whole_block else Causality.windows
        config = replace(config, body=replace(config.body, layers=layers), causality=causality)
    layout = {"zlab": ZLAB, "deepspec": DEEPSPEC, "speculators": SPECULATORS}[case.layout]
    if layout is DEEPSPEC:
        tensors |= {"embed_tokens.weight": head.clone(), "lm_head.weight": head.clone()}
    write_block(folder, config, {key: narrow(tensor) for key, tensor in tensors.items()}, model.num_layers, layout)


def narrow(tensor: torch.Tensor) -> torch.Tensor:
    """Return a weight in bfloat16, and other tensors unchanged, since the files are copied to another machine. Both
    sides compute in float32."""
    return (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()


def theirs(folder: Path, name: str) -> None:
    """Decode the same prompts with vLLM, one after another, and keep what its drafter proposes."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    case, proposed = CASES[name], []

    def keeping(propose: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapped(*arguments: Any, **named: Any) -> torch.Tensor:
            drafts = propose(*arguments, **named)
            proposed.append(drafts[0].tolist())
            return drafts

        return wrapped

    for proposer in (SpecDecodeBaseProposer, DFlashSpeculator):
        proposer.propose = keeping(proposer.propose)
    model = LLM(
        model=str(folder / "target"),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=1,
        enforce_eager=True,
        async_scheduling=False,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**28,
        attention_config={"backend": "TRITON_ATTN"},
        speculative_config={
            "method": case.method,
            "model": str(folder / name),
            "num_speculative_tokens": NUM_DRAFTS,
            **({"parallel_drafting": True} if case.method == "eagle3" else {}),
        },
    )
    known = json.loads((folder / name / OURS).read_text())
    texts = []
    for prompt, text in zip(known["prompts"], known["texts"], strict=True):
        proposed.clear()
        sampling = SamplingParams(temperature=0, max_tokens=len(text["tokens"]), detokenize=False)
        [output] = model.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        tokens = list(output.outputs[0].token_ids)
        texts.append({"tokens": tokens, "drafts": dict(rounds(tokens, proposed))})
    (folder / name / THEIRS).write_text(json.dumps({"texts": texts}))


def rounds(tokens: list[int], proposed: list[list[int]]) -> Iterator[tuple[int, list[int]]]:
    """Yield where each round begins in a text, and its drafts. The first drafts that equal the text were accepted."""
    start = 1
    for drafts in proposed:
        if start > len(tokens):
            return
        yield start, drafts
        start += 1 + agreeing(drafts, tokens[start:])


def agreeing(one: list[int], other: list[int]) -> int:
    """Return the number of equal tokens before the first different one."""
    pairs = list(zip(one, other, strict=False))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))


def table(folder: Path, names: list[str]) -> str:
    """Return a line for each case that both sides have decoded."""
    lines = ["case, texts equal, rounds compared, drafts compared, drafts equal, rounds equal, ours a round, theirs"]
    for name in names:
        files = [folder / name / file for file in (OURS, THEIRS)]
        if not all(file.exists() for file in files):
            print(f"{name}: not decoded by both", file=sys.stderr)
            continue
        mine, other = ([read(text) for text in json.loads(file.read_text())["texts"]] for file in files)
        pairs = [pair for one, two in zip(mine, other, strict=True) for pair in common(one, two)]
        equal = sum(a == b for one, two in pairs for a, b in zip(one, two, strict=True))
        same, whole = sum(a == b for a, b in pairs), len(pairs)
        texts = sum(one.tokens == two.tokens for one, two in zip(mine, other, strict=True))
        lengths = (f"{per_round(texts_of):.3f}" for texts_of in (mine, other))
        counted = (f"{texts} of {len(mine)}", whole, whole * NUM_DRAFTS, equal, same, *lengths)
        lines.append(", ".join([name, *map(str, counted)]))
    return "\n".join(lines)


def read(text: dict[str, Any]) -> Decoded:
    """Read a text of a JSON file, in which keys are strings. Drafts after the end of the text, which vLLM also makes,
    are dropped."""
    drafts = {int(start): drafts for start, drafts in text["drafts"].items() if int(start) < len(text["tokens"])}
    return Decoded(text["tokens"], drafts)


def common(one: Decoded, two: Decoded) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the drafts of both sides for each round that both have after the same tokens."""
    shared = agreeing(one.tokens, two.tokens)
    for start in one.drafts.keys() & two.drafts.keys():
        if start <= shared:
            yield one.drafts[start], two.drafts[start]


def per_round(texts: list[Decoded]) -> float:
    """Return the mean tokens of a round, without the first token of each text."""
    return sum(len(text.tokens) - 1 for text in texts) / sum(len(text.drafts) for text in texts)


if __name__ == "__main__":
    sys.exit(main())
