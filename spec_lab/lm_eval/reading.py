"""Reads the arguments of the harness: `--model_args`, which are overrides of a run, sampling, and stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spec_lab.config.run import SamplingConfig
from spec_lab.core.errors import UserError
from spec_lab.workloads.thinking import Pair, reply_of

USUAL: Mapping[str, str] = {"references": "[]", "profile_rounds": "0"}
"""Default overrides, with which an evaluation has no references and no profile."""
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""The names of the longest output in a task, the harness's first; the first that is given counts, as there."""
READ = (*LIMITS, "until", "do_sample", "temperature", "top_p", "top_k")
WITHOUT_EFFECT: Mapping[str, float] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "repetition_penalty", "length_penalty", "typical_p"), 1),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"), 0),
}
"""Settings that are not read, with the value that changes nothing."""
EVERY_TOKEN = {"top_p": (1,), "top_k": (0, -1)}


def overrides_of(arguments: Mapping[str, Any]) -> list[str]:
    """Return a `KEY=VALUE` for each of `USUAL` and each argument.

    The harness has already parsed `true`, `null` and numbers. It splits arguments at commas, so lists are typed with
    `;` instead.
    """
    return [f"{key}={_value(value)}" for key, value in {**USUAL, **arguments}.items()]


def cut_at(text: str, until: Sequence[str]) -> str:
    """Return the text before the first stop in it; all of it without a stop."""
    return text[: min([len(text), *(place for stop in until if stop and (place := text.find(stop)) >= 0)])]


def answer_in(text: str, until: Sequence[str], thinking_open: bool, pairs: Sequence[Pair]) -> str:
    """Return the answer in an output: what stands behind its thinking, up to the first stop. Stops inside thinking do
    not count. An output that ends inside thinking has no answer, so it is empty.

    Args:
        thinking_open: whether the prompt ends inside thinking.
        pairs: the begin and the end markers of thinking.
    """
    reply = reply_of(text, thinking_open, pairs) or ""
    return cut_at(reply.lstrip() if any(end in text for _, end in pairs) else reply, until)


def most_new_tokens(wanted: Mapping[str, Any], default: int) -> int:
    """Return the longest output that a task asks for, in tokens."""
    return int(next((wanted[name] for name in LIMITS if wanted.get(name) is not None), default))


def require_sampling(wanted: Mapping[str, Any], sampling: SamplingConfig) -> None:
    """Raise UserError for a task that requires other sampling than the run's, or a setting that the engine does not
    have, since that would be another benchmark.

    Args:
        wanted: the task's generation_kwargs, with --gen_kwargs in them.
    """
    samples = wanted.get("do_sample", "temperature" in wanted)
    heat = float(wanted.get("temperature") or 0.0) if samples else 0.0
    others = {key: value for key, value in wanted.items() if key not in READ and value != WITHOUT_EFFECT.get(key)}
    if heat != sampling.temperature:
        others["sampling.temperature"] = heat
    for key in ("top_p", "top_k") if heat else ():
        if wanted.get(key) not in (None, getattr(sampling, key), *EVERY_TOKEN[key]):
            others[f"sampling.{key}"] = wanted[key]
    if others:
        named = " ".join(f"{key}={value}" for key, value in others.items())
        raise UserError(f"--model_args: the task wants {named}; set its sampling in the run, or take another task")


def _value(value: Any) -> str:
    if value is None or value == "None":
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text.replace(";", ",") if text.startswith("[") else text
