"""engine=sglang: SGLang's offline `Engine`.

Each request's `meta_info` has its rounds by accepted drafts, under names that changed with versions. Its own
`spec_accept_length` is completion tokens / rounds: the prompt pass's token is in it, and it is cut at the end token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .plan import Knobs
from .streams import Answer
from .transformers import folders

if TYPE_CHECKING:
    from spec_lab.config.run import Run

KNOBS = Knobs(
    engine="sglang",
    package="sglang",
    install="pip install sglang, and set engine.python to that environment",
    drafters={
        "eagle3": "EAGLE3",
        "draft_model": "STANDALONE",
        "mtp_eagle": "NEXTN",
        "dflash": "DFLASH",
        "dspark": "DSPARK",
        "ngram": "NGRAM",
    },
    rules={"strict": "", "one_hot": ""},
    trees=("dynamic",),
)
ROUNDS = "spec_verify_ct"
HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")
ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
"""Names of one number, the newest version's first."""
OWN = "spec_accept_length"


def refusals(run: Run) -> Iterator[str]:
    """Sampled tokens are judged by the target's probabilities alone."""
    if run.drafter.drafts and run.draws_drafts:
        yield "engine=sglang drafts greedily; use drafter.draft_sampling=greedy acceptance.method=one_hot"


def settings(run: Run, notes: list[str]) -> dict[str, Any]:
    """Return the sizes of the tree; a chain is one of K + 1 rows. SGLang looks n-grams up in a trie of its own."""
    if run.drafter.name == "ngram":
        notes.append("SGLang's NGRAM looks up in a trie of its own, not drafter.min_ngram to drafter.max_ngram")
    sizes, k = run.sizes, run.drafter.num_draft_tokens
    return {"topk": 1, "rows": k + 1} if sizes is None else {"topk": sizes.topk, "rows": sizes.num_rows}


def files(run: Run, scratch: Path) -> dict[str, Any]:
    """Return the Hugging Face folders of target and drafter; UserError for sampling with a reduced vocabulary."""
    from spec_lab.core.errors import UserError

    found = folders(run, scratch, has_head=run.drafter.drafts and run.drafter.name not in ("ngram", "mtp_eagle"))
    if run.drafter.name == "eagle3" and run.sampling.temperature > 0:
        config = json.loads((Path(found["head"]) / "config.json").read_text())
        if config.get("draft_vocab_size", config.get("vocab_size")) != config.get("vocab_size"):
            raise UserError(
                "engine=sglang cannot sample with a head of a reduced vocabulary; use sampling=greedy acceptance=strict"
            )
    return found


class SglangEngine:
    """An `Engine` with one target and one drafter."""

    def __init__(self, told: dict[str, Any]) -> None:
        import sglang

        self.version = sglang.__version__
        self._told = told
        arguments: dict[str, Any] = {
            "model_path": told["target"],
            "dtype": told["dtype"],
            "context_length": told["max_seq_len"] + told["num_draft_tokens"] + 1,
            "max_running_requests": told["batch_size"],
            "disable_cuda_graph": not told["graphs"],
            "disable_radix_cache": True,
            "skip_tokenizer_init": True,
            "random_seed": told["seed"],
            "mem_fraction_static": 0.4,
        }
        if told["method"] is not None:
            arguments |= {
                "speculative_algorithm": told["method"],
                "speculative_num_steps": told["num_draft_tokens"],
                "speculative_eagle_topk": told["topk"],
                "speculative_num_draft_tokens": told["rows"],
                **({} if told["head"] is None else {"speculative_draft_model_path": told["head"]}),
            }
        self._engine = sglang.Engine(**(arguments | told["options"]))

    def generate(self, asked: dict[str, Any], say: Callable[[Answer], None]) -> dict[str, Any]:
        """Answer the requests of a pass, all given at once."""
        told, requests = self._told, asked["requests"]
        params = [
            {
                "temperature": told["temperature"],
                "max_new_tokens": request["max_new_tokens"],
                "ignore_eos": request["ignore_eos"],
                **({} if request["ignore_eos"] else {"stop_token_ids": told["eos_ids"]}),
                **{name: told[name] for name in ("top_k", "top_p") if told[name] is not None},
            }
            for request in requests
        ]
        started = time.perf_counter()
        outputs = self._engine.generate(input_ids=[r["prompt_ids"] for r in requests], sampling_params=params)
        seconds = time.perf_counter() - started
        infos = [output["meta_info"] for output in outputs]
        for request, output in zip(requests, outputs, strict=True):
            say({"id": request["id"], "arrived_at": 0.0, **self._answer(output)})
        done: dict[str, Any] = {"seconds": seconds}
        if told["method"] is not None:
            done |= totals_of(infos)
        return done

    def _answer(self, output: Mapping[str, Any]) -> Answer:
        info = output["meta_info"]
        answer: Answer = {
            "output_ids": list(output["output_ids"]),
            "finish_reason": "length" if info["finish_reason"]["type"] == "length" else "eos",
        }
        if self._told["method"] is not None and (histogram := first_of(info, HISTOGRAM)) is not None:
            k = self._told["num_draft_tokens"]
            answer["histogram"] = [[k, count, times] for count, times in enumerate(histogram) if times]
        return answer


def totals_of(infos: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the drafts of a pass, and the mean of SGLang's own lengths.

    Raises:
        RuntimeError: this version counts under other names.
    """
    accepted = [first_of(info, ACCEPTED) for info in infos]
    if None in accepted or any(ROUNDS not in info for info in infos):
        spec = sorted(name for name in infos[0] if name.startswith("spec_"))
        raise RuntimeError(
            f"this version of SGLang counts under other names than {ROUNDS}, {ACCEPTED[0]}: {', '.join(spec) or 'none'}"
        )
    own = [info[OWN] for info in infos if OWN in info]
    totals = {"rounds": sum(info[ROUNDS] for info in infos), "accepted": sum(count or 0 for count in accepted)}
    return {"totals": totals, "told": {OWN: sum(own) / len(own)} if own else {}}


def first_of(info: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return the value of the first name that is there; None without one."""
    return next((info[name] for name in names if name in info), None)


ENGINE = SglangEngine
"""What the worker makes."""
