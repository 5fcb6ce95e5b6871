"""engine=transformers: assisted generation, prompt lookup and MTP by `generate`, one request at a time.

`generate` returns no counts. A hook around the candidate generator notes what each round offered and accepted, and a
streamer notes when its tokens came. Its first round drafts before the first token, so it is in the prompt pass. A
round near the token limit drafts fewer tokens, so K tokens more are asked for, and cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .plan import Knobs
from .streams import Answer, Asked, cut, served

if TYPE_CHECKING:
    from spec_lab.config.run import Run

KNOBS = Knobs(
    engine="transformers",
    package="transformers",
    install="pip install transformers",
    drafters={"draft_model": "assistant_model", "ngram": "prompt_lookup", "mtp_eagle": "use_mtp"},
    rules={"strict": "", "standard": "", "one_hot": ""},
    batches=False,
)


def refusals(run: Run) -> Iterator[str]:
    """With sampling an assistant draws its drafts, and a looked-up draft has no distribution."""
    drafter: Any = run.drafter
    if run.sampling.temperature <= 0 or not drafter.drafts:
        return
    method, drawn = str(getattr(run.acceptance, "method", "")), getattr(drafter, "draft_sampling", "greedy") != "greedy"
    wanted = ("one_hot", False) if drafter.name == "ngram" else ("standard", True)
    if (method, drawn) != wanted:
        draws = "" if drafter.name == "ngram" else " drafter.draft_sampling=distribution"
        yield (
            f"engine=transformers judges sampled drafter={drafter.name} by {wanted[0]}; use "
            f"acceptance.method={wanted[0]}{draws}"
        )


def settings(run: Run, notes: list[str]) -> dict[str, Any]:
    """Return the longest n-gram; transformers also looks shorter ones up, down to one token."""
    drafter: Any = run.drafter
    if drafter.name != "ngram":
        return {}
    if drafter.min_ngram > 1:
        notes.append("transformers looks up suffixes down to one token, whatever drafter.min_ngram is")
    return {"ngram": drafter.max_ngram}


def files(run: Run, scratch: Path) -> dict[str, Any]:
    """Return the folders of the target and of a draft model."""
    return folders(run, scratch, has_head=run.drafter.name == "draft_model")


def folders(run: Run, scratch: Path, has_head: bool) -> dict[str, Any]:
    """Return the Hugging Face folders of a run's target and, if `has_head`, of its drafter. A GGUF target is written as
    safetensors."""
    from spec_lab.checkpoints.gguf_file import is_gguf
    from spec_lab.export.hf import write_hf

    config: Any = run.engine
    drafter: Any = run.drafter
    target = run.target.folder if config.target is None else Path(config.target)
    if is_gguf(target):
        write_hf(target, scratch / "target")
        target = scratch / "target"
    head = config.head or (str(drafter.folder(run)) if has_head else None)
    return {"target": str(target), "head": head}


class TransformersEngine:
    """A model of transformers, and its assistant."""

    def __init__(self, told: dict[str, Any]) -> None:
        import torch
        import transformers
        from transformers import AutoModelForCausalLM, GenerationConfig

        self.version = transformers.__version__
        self._told = told
        torch.set_num_threads(told["num_threads"])
        kind = {"dtype": getattr(torch, told["dtype"]), **told["options"]}
        self._model = (
            AutoModelForCausalLM.from_pretrained(told["target"], trust_remote_code=False, **kind)
            .to(told["device"])
            .eval()
        )
        eos = self._model.generation_config.eos_token_id
        self._config = GenerationConfig(eos_token_id=eos, pad_token_id=0)
        self._ends = frozenset([eos] if isinstance(eos, int) else eos or ())
        self._model.generation_config = GenerationConfig()  # whose penalties would be taken otherwise
        k, self._drafting = told["num_draft_tokens"], {}
        if told["method"] == "assistant_model":
            assistant = AutoModelForCausalLM.from_pretrained(told["head"], trust_remote_code=False, **kind)
            assistant = assistant.to(told["device"]).eval()
            assistant.generation_config = GenerationConfig(
                num_assistant_tokens=k, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
            )
            self._drafting = {"assistant_model": assistant}
        elif told["method"] == "prompt_lookup":
            self._drafting = {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": told["ngram"]}
        elif told["method"] == "use_mtp":
            self._drafting = {"use_mtp": True, "num_assistant_tokens": k}
        if not hasattr(self._model, "_get_candidate_generator"):
            raise RuntimeError(f"transformers {self.version} makes its candidate generators elsewhere than known here")

    def generate(self, asked: dict[str, Any], say: Callable[[Answer], None]) -> dict[str, Any]:
        """Answer the requests of a pass one after the other."""
        return {"seconds": served(asked["requests"], 1, self._answer, say)}

    def _answer(self, request: Asked, now: Callable[[], float]) -> Answer:
        import torch

        told, limit = self._told, request["max_new_tokens"]
        prompt = torch.tensor([request["prompt_ids"]], device=told["device"])
        judged: list[tuple[int, int]] = []
        streamer = TokenTimes(now)
        is_sampled = told["temperature"] > 0
        torch.manual_seed(request["seed"])
        with _noted(self._model, judged):
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=self._config,
                max_new_tokens=limit + told["num_draft_tokens"],
                do_sample=is_sampled,
                streamer=streamer,
                **({"temperature": told["temperature"]} if is_sampled else {}),
                **{name: told[name] for name in ("top_k", "top_p") if is_sampled and told[name] is not None},
                **({"eos_token_id": None} if request["ignore_eos"] else {}),
                **self._drafting,
            )
        ids = output[0, prompt.shape[1] :].tolist()
        return answer_of(ids, judged, streamer, limit, frozenset() if request["ignore_eos"] else self._ends)


class TokenTimes:
    """A streamer that keeps how many tokens came when; the prompt comes first."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.puts: list[tuple[int, float]] = []

    def put(self, value: Any) -> None:
        self.puts.append((value.numel(), self._now()))

    def end(self) -> None:
        del self.puts[0]


class _noted:
    """Notes what each round of a model's assisted generation offers and accepts."""

    def __init__(self, model: Any, judged: list[tuple[int, int]]) -> None:
        self._model, self._judged = model, judged

    def __enter__(self) -> None:
        make, judged = type(self._model)._get_candidate_generator, self._judged

        def made(*args: Any, **kwargs: Any) -> Any:
            generator = make(self._model, *args, **kwargs)
            update = generator.update_candidate_strategy

            def note(input_ids: Any, scores: Any, num_matches: Any) -> Any:
                judged.append((scores.shape[1] - 1, int(num_matches)))
                return update(input_ids, scores, num_matches)

            generator.update_candidate_strategy = note
            return generator

        self._model._get_candidate_generator = made

    def __exit__(self, *_: object) -> None:
        del self._model._get_candidate_generator


def answer_of(
    ids: list[int], judged: list[tuple[int, int]], streamer: TokenTimes, limit: int, ends: frozenset[int]
) -> Answer:
    """Make an answer from a request's tokens, what its rounds offered and accepted, and when tokens came.

    Without drafts every token behind the first is a round. With them the first round gives the first token too, which
    counts as the prompt pass's.
    """
    if judged and len(judged) != len(streamer.puts):
        raise RuntimeError(f"transformers: {len(judged)} rounds gave tokens {len(streamer.puts)} times")
    counts = [count for count, _ in streamer.puts]
    times = [at for _, at in streamer.puts]
    if judged:
        rounds = [(*pair, count) for pair, count in zip(judged, counts, strict=True)]
        kept, length = cut(rounds, 0, limit)
        emitted = [kept[0][2] - 1, *(count for _, _, count in kept[1:])]
        emitted_at = [times[0], *times[: len(kept)]]
    else:
        kept, length = cut([(0, 0, 1)] * (len(ids) - 1), 1, limit)
        emitted, emitted_at = [1] * len(kept), times[: 1 + len(kept)]
    ended = length == len(ids) and ids[-1] in ends
    return {
        "output_ids": ids[:length],
        "finish_reason": "eos" if ended else "length",
        "offered": [offered for offered, _, _ in kept],
        "accepted": [accepted for _, accepted, _ in kept],
        "judged": [accepted + 1 for _, accepted, _ in kept[:-1]] + [kept[-1][2] if ended else kept[-1][1] + 1]
        if kept
        else [],
        "emitted": emitted,
        "emitted_at": emitted_at,
    }


ENGINE = TransformersEngine
"""What the worker makes."""
