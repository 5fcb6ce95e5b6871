"""engine=vllm: vLLM's offline `LLM`.

Drafts are counted for each request where the version has `per_request_spec_decode_metrics` (from #48915 on), else for a
whole pass, as differences of `get_metrics()`. A round that offered no draft is not counted there. Accepted drafts count
as they were judged, also those behind an end token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .plan import Knobs
from .streams import Answer
from .transformers import folders

if TYPE_CHECKING:
    from spec_lab.config.run import Run

KNOBS = Knobs(
    engine="vllm",
    package="vllm",
    install="pip install vllm, and set engine.python to that environment",
    drafters={
        "eagle3": "eagle3",
        "draft_model": "draft_model",
        "mtp_eagle": "mtp",
        "dflash": "dflash",
        "dspark": "dspark",
        "ngram": "ngram",
    },
    rules={"strict": "", "one_hot": "", "standard": "standard", "block": "block"},
)
PER_REQUEST = "per_request_spec_decode_metrics"
COUNTERS = ("num_drafts", "num_accepted_tokens")
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


def refusals(run: Run) -> Iterator[str]:
    """Drafts are drawn for the rules that read their distribution, and greedy for the others."""
    rule: Any = run.acceptance
    if run.drafter.drafts and run.draws_drafts and getattr(rule, "method", None) == "one_hot":
        yield "engine=vllm drafts greedily for acceptance.method=one_hot; use drafter.draft_sampling=greedy"


def settings(run: Run, notes: list[str]) -> dict[str, Any]:
    """Return the lengths of n-grams."""
    drafter: Any = run.drafter
    return {"ngram": [drafter.min_ngram, drafter.max_ngram]} if drafter.name == "ngram" else {}


def files(run: Run, scratch: Path) -> dict[str, Any]:
    """Return the Hugging Face folders of target and drafter."""
    return folders(run, scratch, has_head=run.drafter.drafts and run.drafter.name not in ("ngram", "mtp_eagle"))


class VllmEngine:
    """An `LLM` with one target and one drafter."""

    def __init__(self, told: dict[str, Any]) -> None:
        import vllm
        from vllm.engine.arg_utils import EngineArgs

        self.version = vllm.__version__
        self._told, self._vllm = told, vllm
        k = told["num_draft_tokens"]
        arguments: dict[str, Any] = {
            "model": told["target"],
            "dtype": told["dtype"],
            "max_model_len": told["max_seq_len"] + k + 1,
            "max_num_seqs": told["batch_size"],
            "enforce_eager": not told["graphs"],
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
            "seed": told["seed"],
            "gpu_memory_utilization": 0.4,
        }
        self._by_request = PER_REQUEST in getattr(EngineArgs, "__dataclass_fields__", {})
        if told["method"] is not None:
            arguments["speculative_config"] = speculative_config(told)
            if self._by_request:
                arguments[PER_REQUEST] = "detailed"
        self._llm = vllm.LLM(**(arguments | told["options"]))

    def generate(self, asked: dict[str, Any], say: Callable[[Answer], None]) -> dict[str, Any]:
        """Answer the requests of a pass, all given at once."""
        told, requests = self._told, asked["requests"]
        prompts = [{"prompt_token_ids": request["prompt_ids"]} for request in requests]
        params = [
            self._vllm.SamplingParams(
                temperature=told["temperature"],
                max_tokens=request["max_new_tokens"],
                ignore_eos=request["ignore_eos"],
                stop_token_ids=None if request["ignore_eos"] else told["eos_ids"],
                detokenize=False,
                seed=request["seed"],
                **{name: told[name] for name in ("top_k", "top_p") if told[name] is not None},
            )
            for request in requests
        ]
        before = self._counters()
        started = time.monotonic()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.monotonic() - started
        for request, output in zip(requests, outputs, strict=True):
            say({"id": request["id"], **self._answer(output, started)})
        done: dict[str, Any] = {"seconds": seconds}
        if told["method"] is not None:
            done |= counted(before, self._counters(), told["num_draft_tokens"])
        return done

    def _answer(self, output: Any, started: float) -> Answer:
        (completion,) = output.outputs
        answer: Answer = {
            "output_ids": list(completion.token_ids),
            "finish_reason": "length" if completion.finish_reason == "length" else "eos",
            "arrived_at": 0.0,
        }
        stats = output.metrics  # of monotonic clocks
        if getattr(stats, "first_token_ts", None):
            answer["emitted_at"] = [stats.first_token_ts - started, stats.last_token_ts - started]
            answer["admitted_at"] = stats.scheduled_ts - started
        if self._told["method"] is not None and self._by_request:
            metrics = completion.spec_decode_metrics
            accepted, offered = metrics.per_step_accepted, metrics.per_step_drafted
            if accepted is None or offered is None:
                k = self._told["num_draft_tokens"]
                answer["histogram"] = [[k, count, times] for count, times in enumerate(metrics.histogram) if times]
            else:
                answer |= {"offered": list(offered), "accepted": list(accepted)}
        return answer

    def _counters(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for metric in self._llm.get_metrics() if self._told["method"] is not None else ():
            name = metric.name.removesuffix("_total")
            if name == BY_POSITION:
                found[name] = [a + b for a, b in zip(found.get(name, [0] * 99), metric.values, strict=False)]
            elif name.startswith("vllm:spec_decode_"):
                found[name] = found.get(name, 0) + metric.value
        return found


def speculative_config(told: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's configuration of a drafter and its rule."""
    config = {"method": told["method"], "num_speculative_tokens": told["num_draft_tokens"]}
    if told["head"] is not None:
        config["model"] = told["head"]
    if told["method"] == "ngram":
        config["prompt_lookup_min"], config["prompt_lookup_max"] = told["ngram"]
    if told["temperature"] > 0 and told["rule"]:
        config |= {"draft_sample_method": "probabilistic", "rejection_sample_method": told["rule"]}
    return config


def counted(before: dict[str, Any], after: dict[str, Any], most: int) -> dict[str, Any]:
    """Return the drafts of a pass from vLLM's counters before and after it, and its own mean.

    Raises:
        RuntimeError: this version has other counters.
    """
    names = [f"vllm:spec_decode_{name}" for name in COUNTERS]
    if missing := [name for name in names if name not in after]:
        raise RuntimeError(f"this version of vLLM has no counter {missing[0]}; its drafts cannot be counted")
    rounds, accepted = (round(after[name] - before.get(name, 0)) for name in names)
    newest = after.get(BY_POSITION)
    by_position = None
    if newest is not None:
        oldest = before.get(BY_POSITION) or [0] * len(newest)
        by_position = [round(new - old) for new, old in zip(newest[:most], oldest, strict=False)]
    totals = {"rounds": rounds, "accepted": accepted, "by_position": by_position}
    return {"totals": totals, "told": {"mean_acceptance_length": 1 + accepted / rounds} if rounds else {}}


ENGINE = VllmEngine
"""What the worker makes."""
