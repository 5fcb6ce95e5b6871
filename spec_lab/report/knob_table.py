"""The table of a study of knobs: a line for each run, with the knobs first and then the study's numbers.

`python -m spec_lab.report FOLDER` shows it for `experiment=pruning`, `prefill_outputs`, `sampling`, `batch_scaling`,
`adaptive_k` and `trees`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

from spec_lab.record.averages import ratio
from spec_lab.record.paired import PairedRatio, over_reference
from spec_lab.record.runs import Run
from spec_lab.record.schema import Summary
from spec_lab.record.wording import ABSENT, number
from spec_lab.report.cells import ratio_cell
from spec_lab.report.comparable import BESIDE_THE_RUN
from spec_lab.report.table import format_table

Columns = Mapping[str, Callable[[Summary], str]]
WORDS = ("prune", "prefill", "method", "drafts", "drafter", "drafting", "graph", "tree")


@dataclass(frozen=True, slots=True)
class Drawn:
    """Describes the figure of a study.

    Attributes:
        knob: column header of the key on the x axis; each combination of the other keys makes a line.
        quantity: name of the number on the y axis.
        number: returns the number of a run; None if it has none.
        even: the number at which the run is as fast as what it is compared with; a horizontal line is drawn there.
    """

    knob: str
    quantity: str
    number: Callable[[Summary], float | PairedRatio | None]
    even: float | None = None


@dataclass(frozen=True, slots=True)
class KnobStudy:
    """One `experiment=...`: its question, the dotted keys that it sweeps (by column header), and its columns.

    Attributes:
        keys: those that always have a column. If a key names a group, its column shows the name of the run's choice.
        more_keys: those that have a column only if the study's runs differ in them.
        follows: keys that follow from the others, and have no column.
        shown: functions that write keys whose values are too long for a table.
    """

    experiment: str
    question: str
    keys: Mapping[str, str]
    columns: Columns
    drawn: Drawn
    more_keys: Mapping[str, str] = field(default_factory=dict)
    follows: Sequence[str] = ()
    shown: Columns = field(default_factory=dict)

    @property
    def all_keys(self) -> dict[str, str]:
        """Return the keys in which runs may differ, beginning with `more_keys`."""
        return {**self.more_keys, **self.keys}


def _length(summary: Summary) -> str:
    return number(summary["acceptance_length"])


def _rate(summary: Summary) -> str:
    return number(summary["decode_tokens_per_second"], 1)


def _round(summary: Summary) -> str:
    return number(summary["round_ms"])


def _prompt_pass(summary: Summary) -> str:
    return number(summary["prefill_ms_per_request"])


def _speedup(summary: Summary) -> str:
    return ratio_cell(_over_plain(summary))


def _pruning_speedup(summary: Summary) -> str:
    return ratio_cell(_over_unpruned(summary))


def _rows(kind: Literal["catchup_computed", "prefill_hidden", "prefill_logits"]) -> Callable[[Summary], str]:
    return lambda summary: number(summary["rows"][kind], 0)


def _unpruned_prompt_pass(summary: Summary) -> str:
    unpruned = summary["references"].get("unpruned")
    return number(None if unpruned is None else unpruned["prefill_ms_per_request"])


def _first_rate(summary: Summary) -> str:
    rates = summary["acceptance_rate_by_position"]["unconditional"]
    return number(100 * rates[0], 0) if rates and rates[0] is not None else ABSENT


def _stage(name: str) -> Callable[[Summary], str]:
    return lambda summary: number(summary["stage_ms_per_round"].get(name))


def _per_round(kind: Literal["drafted", "offered", "verified"]) -> Callable[[Summary], str]:
    """Return a function that writes a count for each request round; 0 in older records, which lack the count."""
    return lambda summary: number(ratio(summary["rows"].get(kind, 0), summary["rounds"]))


def drafting_of(summary: Summary) -> str:
    """Describe where K comes from. A schedule is written as `1:5 3:3`: 5 from 1 running request on, 3 from 3 on."""
    drafter = summary["config"].get("drafter", {})
    schedule, stop = drafter.get("k_schedule"), drafter.get("stop", "none")
    if schedule:
        return " ".join(f"{first}:{k}" for first, _, k in schedule)
    return "fixed" if stop == "none" else f"stop {drafter['stop_threshold']}"


def _over_plain(summary: Summary) -> PairedRatio | None:
    return over_reference(summary, summary, "plain")


def _over_unpruned(summary: Summary) -> PairedRatio | None:
    return over_reference(summary, summary, "unpruned")


OVER_PLAIN = ("decode rate over plain decoding's", _over_plain, 1.0)
STUDIES = (
    KnobStudy(
        "pruning",
        "What pruning saves: rows of the catch-up step, ms of it, of a round, of a prompt; rate over an unpruned run's",
        {"K": "drafter.num_draft_tokens", "prune": "prune"},
        {
            "length": _length, "rows": _rows("catchup_computed"), "catchup": _stage("catchup"), "round": _round,
            "prompt": _prompt_pass, "over unpruned": _pruning_speedup,
        },
        Drawn("prune", "decode rate over an unpruned run's", _over_unpruned, 1.0),
        {"tokens": "workload.prompt_tokens", "batch": "batch_size"},
        ("workload.num_requests",),
    ),
    KnobStudy(
        "prefill_outputs",
        "What it saves to compute outputs for the last prompt row only: rows past the last KV write, ms a prompt pass",
        {"prompt tokens": "workload.prompt_tokens", "prefill": "prune.prefill"},
        {
            "rows": _rows("prefill_hidden"), "rows to logits": _rows("prefill_logits"),
            "prompt pass": _prompt_pass, "unpruned beside it": _unpruned_prompt_pass,
        },
        Drawn("prompt tokens", "prompt pass, ms a request", lambda summary: summary["prefill_ms_per_request"]),
        {"drafter": "drafter", "chunk": "cache.prefill_chunk"},
    ),
    KnobStudy(
        "sampling",
        "How sampling is verified: acceptance by temperature, drafts and rule (@1: percent of first drafts accepted)",
        {"temperature": "sampling.temperature", "method": "acceptance.method", "drafts": "drafter.draft_sampling"},
        {"length": _length, "@1": _first_rate, "tok/s": _rate, "speedup": _speedup},
        Drawn("temperature", "acceptance length, tokens a round", lambda summary: summary["acceptance_length"]),
    ),
    KnobStudy(
        "batch_scaling",
        "Where drafting stops paying: by batch size, ms a round, and the length at which it breaks even",
        {"K": "drafter.num_draft_tokens", "batch": "batch_size"},
        {
            "length": _length,
            "break-even": lambda summary: number(summary["break_even_acceptance_length"]),
            "verify": _stage("verify"), "round": _round, "tok/s": _rate, "speedup": _speedup,
        },
        Drawn("batch", *OVER_PLAIN),
        {"tokens": "workload.prompt_tokens"},
        ("workload.num_requests",),
    ),
    KnobStudy(
        "adaptive_k",
        "K at run time: by batch, the length, and in a request round the drafts made and offered and the rows verified",
        {
            "batch": "batch_size", "graph": "graph", "K": "drafter.num_draft_tokens", "drafting": "drafter",
            "budget": "verify.budget",
        },
        {
            "length": _length, "drafted": _per_round("drafted"), "offered": _per_round("offered"),
            "rows": _per_round("verified"), "tok/s": _rate, "speedup": _speedup,
        },
        Drawn("batch", *OVER_PLAIN),
        shown={"drafting": drafting_of},
    ),
    KnobStudy(
        "trees",
        "Draft trees beside chains: by batch, the rows that a request's round verifies, the length, ms a round",
        {
            "batch": "batch_size", "drafter": "drafter", "tree": "tree", "K": "drafter.num_draft_tokens",
        },
        {
            "rows": _per_round("verified"), "length": _length, "round": _round, "tok/s": _rate, "speedup": _speedup,
        },
        Drawn("batch", *OVER_PLAIN),
    ),
)  # fmt: skip


def read_knob_studies(runs: Sequence[Run]) -> list[tuple[KnobStudy, list[Run]]]:
    """Find the studies among `runs`, each with its finished runs in the order of the knobs. Runs that also differ in
    anything else, such as the target or the size, make separate studies. Of equal runs the newest is used."""
    found: dict[tuple[str, str], dict[str, Run]] = {}
    by_name = {study.experiment: study for study in STUDIES}
    for run in runs:
        study = by_name.get(run.summary["choices"].get("experiment", ""))
        if study is not None and run.summary["status"] == "finished":
            cells = found.setdefault((study.experiment, _shared(study, run.summary)), {})
            cells[str(_values(study, run.summary))] = run
    return [(by_name[name], _ordered(by_name[name], list(cells.values()))) for (name, _), cells in found.items()]


def is_told_by_knobs(summaries: Sequence[Summary]) -> bool:
    """Return whether all runs belong to one study, and have one drafter or a table that shows their drafters."""
    experiments = {summary["choices"].get("experiment", "") for summary in summaries}
    study = next((study for study in STUDIES if {study.experiment} == experiments), None)
    if study is None:
        return False
    drafters = {summary["choices"].get("drafter") for summary in summaries}
    return len(drafters) == 1 or "drafter" in study.keys.values()


def format_knob_study(study: KnobStudy, runs: Sequence[Run]) -> str:
    """Write the question and the table."""
    keys = shown_keys(study, runs)
    body = [
        [
            *(shown_key(study, run.summary, name, key) for name, key in keys.items()),
            *(show(run.summary) for show in study.columns.values()),
        ]
        for run in runs
    ]
    return f"{study.question}\n\n{format_table([*keys, *study.columns], body, left=WORDS, num_keys=len(keys))}"


def shown_keys(study: KnobStudy, runs: Sequence[Run]) -> dict[str, str]:
    """Return the keys that have a column: those of `more_keys` in which runs differ, then `keys`."""
    varied = {
        name: key for name, key in study.more_keys.items() if len({str(_value(run.summary, key)) for run in runs}) > 1
    }
    return {**varied, **study.keys}


def shown_key(study: KnobStudy, summary: Summary, name: str, key: str) -> str:
    """Return a run's value for a key, as a table shows it."""
    if name in study.shown:
        return study.shown[name](summary)
    value = _value(summary, key)
    return ABSENT if value is None else str(value)


def _values(study: KnobStudy, summary: Summary) -> list[Any]:
    return [_value(summary, key) for key in study.all_keys.values()]


def _value(summary: Summary, key: str) -> Any:
    if key in summary["choices"]:
        return summary["choices"][key]
    *groups, leaf = key.split(".")
    part: Mapping[str, Any] = reduce(lambda node, group: node.get(group, {}), groups, summary["config"])
    return part.get(leaf, ABSENT)


def _ordered(study: KnobStudy, runs: Sequence[Run]) -> list[Run]:
    """Sort runs by their knobs: numbers by value, texts in the order in which they ran."""
    values = {id(run): _values(study, run.summary) for run in runs}
    seen = [list(dict.fromkeys(str(row[place]) for row in values.values())) for place in range(len(study.all_keys))]

    def place_of(run: Run) -> list[float]:
        return [
            value if isinstance(value, (int, float)) else order.index(str(value))
            for value, order in zip(values[id(run)], seen, strict=True)
        ]

    return sorted(runs, key=place_of)


def _shared(study: KnobStudy, summary: Summary) -> str:
    """Return the configuration without the knobs of the study."""
    config = {key: value for key, value in summary["config"].items() if key not in BESIDE_THE_RUN}
    for key in (*study.all_keys.values(), *study.follows):
        *groups, leaf = key.split(".")
        if groups:
            [group] = groups
            config[group] = {name: value for name, value in config.get(group, {}).items() if name != leaf}
        else:
            config.pop(leaf, None)
    return json.dumps(config, sort_keys=True)
