"""The columns of a row's provenance in a paper's table. A row that lacks one is not printed; `none` is a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_lab.record.schema import Summary
from spec_lab.report.knob_table import drafting_of
from spec_lab.report.known_options import describe_mode, describe_rule

NONE = "none"
COLUMNS: Mapping[str, str] = {
    "K": "draft tokens a round, and the settings that may reduce them",
    "drafter": "the drafter's name in the run",
    "rule": "which drafts are accepted",
    "prune": "which rows are dropped",
    "tree": "whether drafts branch",
    "thinking": "whether the target's tokenizer has thinking markers",
    "template": "twelve digits of a hash of the chat template",
    "sampler": "temperature, top-p and top-k",
    "limits": "the most new tokens of a request, the longest context, and the turns that are asked",
    "batch": "the most requests in a round",
    "dtype": "of target and drafter",
    "device": "GPU, or CPU with its threads",
    "graph": "which parts of a round are captured",
    "revision": "commit of the lab, or its release outside a checkout",
}


def provenance_of(summary: Summary) -> dict[str, str | None]:
    """Return a run's provenance by column; None for a column that its record does not have."""
    config, choices = summary["config"], summary["choices"]
    return {
        "K": _drafts(summary),
        "drafter": choices.get("drafter"),
        "rule": describe_rule(summary).rule if config.get("acceptance") else None,
        "prune": choices.get("prune"),
        "tree": choices.get("tree", NONE) if "tree" in config or "tree" in choices else None,
        "thinking": {True: "markers", False: NONE}.get(summary.get("thinking_markers")),  # type: ignore[arg-type]
        "template": summary.get("template"),
        "sampler": _sampler(config.get("sampling")),
        "limits": _limits(config),
        "batch": _text(config.get("batch_size")),
        "dtype": summary["dtype"],
        "device": _device(summary),
        "graph": describe_mode(summary) if config.get("graph") else None,
        "revision": summary["git_revision"] or _release(summary),
    }


def missing(provenance: Mapping[str, str | None]) -> list[str]:
    """Return the columns that a row lacks."""
    return [name for name in COLUMNS if not provenance.get(name)]


def _drafts(summary: Summary) -> str | None:
    """Return K, followed by other settings that determine a request's K, if any: `3, stop 0.4`."""
    config, drafting = summary["config"], drafting_of(summary)
    budget, by_request = (config.get("verify") or {}).get("budget"), config.get("drafter", {}).get("by_request", "same")
    marks = {
        drafting: drafting != "fixed",
        f"budget {budget}": budget is not None,
        f"by request: {by_request}": by_request != "same",
    }
    known = _text(summary["num_draft_tokens"])
    return None if known is None else ", ".join([known, *(mark for mark, is_set in marks.items() if is_set)])


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _sampler(sampling: Any) -> str | None:
    if not isinstance(sampling, dict) or "temperature" not in sampling:
        return None
    if sampling["temperature"] == 0:
        return "greedy"
    others = [f"{name} {_or_none(sampling.get(key))}" for name, key in (("top-p", "top_p"), ("top-k", "top_k"))]
    return ", ".join([f"T {sampling['temperature']:g}", *others])


def _limits(config: Mapping[str, Any]) -> str | None:
    workload = config.get("workload")
    if config.get("max_new_tokens") is None or not isinstance(workload, dict):
        return None
    context = (config.get("cache") or {}).get("max_seq_len")
    turns = "all" if workload.get("turns") is None else workload["turns"]
    return f"{config['max_new_tokens']} new, context {_or_none(context)}, {turns} turns"


def _device(summary: Summary) -> str | None:
    if summary["device_name"] is None:
        return None
    if summary["device"] == "cpu":
        return f"{summary['device_name']}, threads {summary['num_threads']}"
    processes = summary.get("world_size") or 1
    return f"{processes} x {summary['device_name']}"


def _release(summary: Summary) -> str | None:
    version = summary["versions"].get("spec_lab")
    return None if version is None else f"release {version}"


def _or_none(value: Any) -> str:
    return NONE if value is None else str(value)
