"""engine=llamacpp: llama.cpp's own server, in the process of its package xllamacpp.

Its stream has a line for each token, with the drafts that the request has offered and accepted so far
(`timings_per_token`). So its rounds are known one by one. A round near the token limit drafts fewer tokens, so
it is asked for K tokens more, which are cut: every round that counts offers what it would offer elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .plan import Knobs
from .streams import Answer, Asked, cut, events, served

if TYPE_CHECKING:
    from spec_lab.config.run import Run

KNOBS = Knobs(
    engine="llamacpp",
    package="xllamacpp",
    install="pip install 'spec-lab[llamacpp]'",
    drafters={
        "eagle3": "DRAFT_EAGLE3",
        "draft_model": "DRAFT_SIMPLE",
        "mtp_eagle": "DRAFT_MTP",
        "dflash": "DRAFT_DFLASH",
        "dspark": "DRAFT_DSPARK",
        "ngram": "NGRAM_SIMPLE",
    },
    rules={"strict": "", "one_hot": ""},
    arrivals=True,
    ignores_eos=False,  # it forbids the token
)
DRAFTS_MTP = "qwen35"
"""The beginning of the architectures whose MTP module llama.cpp drafts with."""


def refusals(run: Run) -> Iterator[str]:
    """Sampled tokens are compared with the drafts, which are then greedy. With several requests at
    once llama.cpp accepts few drafts of EAGLE-3, and why is not known (docs/engines.md)."""
    if run.drafter.name == "eagle3" and run.batch_size > 1:
        yield "engine=llamacpp accepts too little of drafter=eagle3 with several requests at once; use batch_size=1"
    if run.draws_drafts:
        yield "engine=llamacpp drafts greedily; use drafter.draft_sampling=greedy acceptance.method=one_hot"


def settings(run: Run, notes: list[str]) -> dict[str, Any]:
    """Return the n-gram length, which is one in llama.cpp, and the type of weights and caches."""
    drafter: Any = run.drafter
    if drafter.name != "ngram":
        return {"dtype": str(run.dtype)}
    notes.append(f"llama.cpp looks up the last {drafter.max_ngram} tokens alone, without shorter suffixes")
    return {"dtype": str(run.dtype), "ngram": drafter.max_ngram}


def files(run: Run, scratch: Path) -> dict[str, Any]:
    """Return the GGUF files of target and head. A GGUF target is written in float32 for dtype=float32, since llama.cpp
    would otherwise round activations too; a head in safetensors is converted.

    Raises:
        UserError: there is no GGUF file.
    """
    from spec_lab.checkpoints.gguf_file import is_gguf, read_head
    from spec_lab.core.errors import UserError
    from spec_lab.export.gguf_files import write_eagle3, write_target

    config: Any = run.engine
    drafter: Any = run.drafter
    source = run.target.folder if config.target is None else Path(config.target)
    if not is_gguf(source):
        raise UserError(
            f"engine=llamacpp reads GGUF, and {source.name} is none; convert it with llama.cpp's own converter, and "
            "add engine.target=FILE.gguf"
        )
    target = source
    if config.target is None and run.dtype == "float32":
        target = scratch / "target.gguf"
        write_target(target, source)
    head = None if config.head is None else Path(config.head)
    if drafter.name == "eagle3" and head is None:
        head = scratch / "head.gguf"
        write_eagle3(head, drafter.folder(run), source)
    family = read_head(target).architecture
    if drafter.name == "mtp_eagle" and not family.startswith(DRAFTS_MTP):
        raise UserError(
            f"engine=llamacpp drafts with the MTP module inside a file of {DRAFTS_MTP}, not of {family}; "
            "use drafter=eagle3, or engine=lab"
        )
    if drafter.name in ("draft_model", "dflash", "dspark") and head is None:
        raise UserError(f"engine=llamacpp reads drafter={drafter.name} from GGUF; add engine.head=FILE.gguf")
    return {"target": str(target), "head": None if head is None else str(head)}


class LlamaCppEngine:
    """llama.cpp with one target and one drafter."""

    def __init__(self, told: dict[str, Any]) -> None:
        import importlib.metadata

        import xllamacpp

        self.version = importlib.metadata.version("xllamacpp")
        self._told = told
        params = xllamacpp.CommonParams()
        params.model.path, params.n_parallel = told["target"], told["batch_size"]
        longest = -(-(told["max_seq_len"] + told["num_draft_tokens"] + 1) // 256) * 256
        params.n_ctx = longest * told["batch_size"]
        is_float32 = told["dtype"] == "float32"
        cpu = told["device"].startswith("cpu")
        for each in (params.cpuparams, params.cpuparams_batch):
            each.n_threads = told["num_threads"]
        params.n_gpu_layers = 0 if cpu else -1
        params.verbosity = 1
        if is_float32:
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        if told["method"] is not None:
            kinds, draft = xllamacpp.common_speculative_type, params.speculative.draft
            params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{told['method']}")]
            draft.n_max, draft.n_min, draft.p_min = told["num_draft_tokens"], 0, 0.0
            draft.n_gpu_layers = params.n_gpu_layers
            for each in (draft.cpuparams, draft.cpuparams_batch):
                each.n_threads = told["num_threads"]
            if told["head"] is not None:
                draft.mparams.path = told["head"]
            if is_float32:
                draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            if told["method"].startswith("NGRAM"):
                look_up = params.speculative.ngram_simple
                look_up.size_n, look_up.size_m = told["ngram"], told["num_draft_tokens"]
        for name, value in told["options"].items():
            setattr(params, name, value)
        self._server = xllamacpp.Server(params)
        self._url = self._server.listening_address

    def generate(self, asked: dict[str, Any], say: Callable[[Answer], None]) -> dict[str, Any]:
        """Answer the requests of a pass, `batch_size` at a time."""
        return {"seconds": served(asked["requests"], self._told["batch_size"], self._answer, say)}

    def _answer(self, request: Asked, now: Callable[[], float]) -> Answer:
        told, limit = self._told, request["max_new_tokens"]
        body = {
            "prompt": request["prompt_ids"],
            "n_predict": limit + told["num_draft_tokens"],
            "temperature": told["temperature"],
            "top_k": told["top_k"] or 0,
            "top_p": told["top_p"] or 1.0,
            "min_p": 0.0,
            "seed": request["seed"],
            "cache_prompt": False,
            "stream": True,
            "return_tokens": True,
            "timings_per_token": True,
        }
        stream = events(self._url, "/completion", body, told["timeout"], {})
        return read_stream(stream, limit, now)


def read_stream(stream: Iterator[Any], limit: int, now: Callable[[], float]) -> Answer:
    """Read a request's stream up to its end, or past its limit, and count its rounds.

    A token with more drafts than the one before begins a round that offered them. Tokens follow in it as long as it
    accepted more drafts than it has given out. Any other token behind the first is of a round without drafts.
    """
    ids: list[int] = []
    rounds: list[tuple[int, int, int]] = []
    times: list[float] = []
    offered = accepted = 0
    ended = False
    for event in stream:
        if "error" in event:
            raise RuntimeError(f"llama.cpp: {json.dumps(event['error'])[:300]}")
        if event["stop"]:
            ended = event["stop_type"] == "eos"
            break
        if not event["tokens"]:
            continue
        timings = event["timings"]
        drafts = timings.get("draft_n", 0) - offered, timings.get("draft_n_accepted", 0) - accepted
        if not ids:
            times.append(now())
        elif drafts[0] > 0 or not rounds or rounds[-1][2] > rounds[-1][1]:
            if len(ids) >= limit:
                break
            times.append(now())
            rounds.append((drafts[0], drafts[1], 1))
            offered, accepted = offered + drafts[0], accepted + drafts[1]
        else:
            rounds[-1] = (*rounds[-1][:2], rounds[-1][2] + 1)
        ids += event["tokens"]
    stream.close()  # type: ignore[attr-defined]
    kept, length = cut(rounds, 1, limit)
    ended = ended and length == len(ids)
    judged = [accepted + 1 for _, accepted, _ in kept]
    if ended and kept:
        judged[-1] = kept[-1][2]
    return {
        "output_ids": ids[:length],
        "finish_reason": "eos" if ended else "length",
        "offered": [offered for offered, _, _ in kept],
        "accepted": [accepted for _, accepted, _ in kept],
        "judged": judged,
        "emitted": [emitted for _, _, emitted in kept],
        "emitted_at": times[: 1 + len(kept)],
    }


ENGINE = LlamaCppEngine
"""What the worker makes."""
