"""The schema of a run: the type, the default and the explanation of every key.

It has only values. The additional keys of one option (`acceptance.topk`, `drafter.window`) are in a subclass in the
option's module in `spec_lab.options`. A YAML file under `conf/` names its schema in its defaults list, and sets the
values that the option changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from spec_lab.menu.bounds import BOUNDS, Bounds
from spec_lab.menu.choices import (
    ByRequest,
    DraftSampling,
    DraftStop,
    Dtype,
    KernelsChoice,
    ReferenceChoice,
    Rollback,
    Unusable,
    WeightDtype,
    Weights,
)


def knob(
    default: Any,
    explanation: str,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
) -> Any:
    """Make a dataclass field with its line in `--help`. If the default is a list it is copied for every instance.

    `menu.bounds` refuses a number below `least`, above `most` or not greater than `above`; in a list it checks each
    entry.
    """
    metadata = {"help": explanation, BOUNDS: Bounds(least, most, above)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class TargetConfig:
    """target=pocket (shipped), target=hf target.path=DIR, or the shape of a known model."""

    name: str = MISSING
    path: str | None = knob(
        None, "folder of a Hugging Face checkpoint of a family in docs/families.md; target=hf, or a shape"
    )
    weights: Weights = knob(Weights.checkpoint, "where the weights come from")
    weight_dtype: WeightDtype = knob(
        WeightDtype.auto,
        "what its products keep their weights in; the drafter stays in dtype, and of fp8 embedding and head do",
    )
    tensor_parallel: int = knob(1, "processes that the layers are split over, as torchrun starts them", least=1)


@dataclass
class DrafterConfig:
    """The keys that every drafter has."""

    name: str = MISSING
    num_draft_tokens: int = knob(3, "draft tokens a round, K; a round verifies K + 1 rows a request")
    k_schedule: list[list[int]] | None = knob(
        None, "K by running requests: [first, last, K] each; its largest K is num_draft_tokens; null is one K for all"
    )
    by_request: ByRequest = knob(ByRequest.same, "what the K of a request follows from; num_draft_tokens is the most")
    off_below: float = knob(
        0.0,
        "accepted drafts a round under which a request is drafted for no more; by_request=acceptance only; 0 is never",
        least=0,
    )


@dataclass
class TrainedDrafterConfig(DrafterConfig):
    """The keys that every drafter with weights has."""

    path: str | None = knob(None, "folder of the drafter's weights; null is what is shipped for the target")
    draft_sampling: DraftSampling = knob(DraftSampling.greedy, "how drafts are picked")
    stop: DraftStop = knob(DraftStop.none, "what ends a request's drafting")
    stop_threshold: float = knob(
        0.4,
        "least product of top-1 probabilities to go on drafting; drafter.stop=confidence only",
        above=0,
        most=1,
    )
    confidence_temperatures: list[float] | None = knob(
        None, "one for each draft, by which the logits of its confidence are divided; null leaves it as it is", above=0
    )


@dataclass
class AcceptanceConfig:
    """The keys that every acceptance rule has."""

    name: str = MISSING
    lossless_only: bool = knob(False, "refuse every rule that may change the output, as whoever trains on it must")


@dataclass
class TreeConfig:
    """tree=none: a round's drafts are a chain. Options with trees have additional keys."""

    name: str = "none"


@dataclass
class PruneConfig:
    """prune=none|prefill|post_attention|catchup. The options only set the two knobs, which can also be set directly."""

    prefill: str = knob("all_rows", "prompt rows that go on past the KV write")
    catchup: str = knob("none", "where the catch-up step drops its dead rows")


@dataclass
class GraphConfig:
    """The keys that every graph mode has."""

    name: str = MISSING


@dataclass
class AutoGraphConfig(GraphConfig):
    """graph=auto: `spec_lab.menu.auto` chooses one of the other modes when a run is composed."""

    name: str = "auto"


@dataclass
class AttentionConfig:
    """attention=torch: the reference backend, any device."""

    name: str = "torch"


@dataclass
class VerifyConfig:
    """How many of the drafts are verified."""

    budget: int | None = knob(
        None, "rows a round over the batch, given to the drafts likeliest to be accepted; null is all rows", least=2
    )


@dataclass
class RecurrentConfig:
    """Keys for layers that keep a state, such as gated delta nets; a no-op for other targets."""

    rollback: Rollback = knob(Rollback.checkpoints, "how a round's rejected drafts are taken back from a state")


@dataclass
class CacheConfig:
    """The paged KV cache."""

    page_size: int = knob(16, "tokens a page", least=1)
    max_seq_len: int | None = knob(None, "longest sequence, in tokens; null is what the workload needs")
    num_pages: int | None = knob(None, "pages in all; null is enough for batch_size requests of the longest length")
    prefill_chunk: int | None = knob(
        None,
        "prompt rows of one request a forward; null is 8192 on CUDA with attention=triton, else 512, and never over "
        "prefill_tokens",
        least=1,
    )
    prefill_tokens: int | None = knob(
        None,
        "prompt rows of all requests a forward, 1 for one each; null is 8192 on CUDA, 1 in C, else 2048",
        least=1,
    )

    @property
    def chunk_size(self) -> int:
        """Return the value of `prefill_chunk`, which is a number once a run is composed."""
        assert self.prefill_chunk is not None, "chosen by spec_lab.menu.auto"
        return self.prefill_chunk


@dataclass
class RecordConfig:
    """What is recorded in addition to the measurements."""

    topk: int = knob(
        0,
        "likeliest tokens of each verify row kept for re-scoring, in a pass of its own, 16 say; 0 keeps none",
        least=0,
    )


@dataclass
class WorkloadConfig:
    """workload=pocket (shipped prompts), generated, jsonl, spec_bench, reasoning_gym, fixed_length, random_ids."""

    name: str = MISSING
    limit: int | None = knob(None, "prompts a run, taken in turn from the categories; null is all of them", least=1)
    categories: list[str] | None = knob(None, "categories to take prompts from; null is all of them")
    path: str | None = knob(None, "JSON Lines file with the prompts; workload=jsonl and spec_bench only")
    prompt_tokens: int | None = knob(
        None, "tokens a prompt; workload=fixed_length and random_ids only", most=10**7, least=1
    )
    per_category: int | None = knob(
        None, "prompts drawn of each category; workload=generated and reasoning_gym only", most=10**4, least=1
    )
    tasks: list[str] | None = knob(None, "tasks of reasoning_gym, each a category; workload=reasoning_gym only")
    turns: int | None = knob(
        None, "turns asked of a conversation; null is all of them; workload=jsonl and spec_bench only", least=1
    )
    system: str | None = knob(
        None, "what a chat is told in front of its first turn, where its line says nothing of its own; null is nothing"
    )
    unusable: Unusable = knob(
        Unusable.refuse, "where a line of the file is broken, or a prompt is longer than the target reads"
    )
    num_requests: int | None = knob(
        None, "how many requests; workload=fixed_length and random_ids only", most=10**6, least=1
    )
    checker: str = knob("answer", "what reads the answer in an output; a prompt of a file may name its own")
    ignore_eos: bool = knob(False, "decode on past the end-of-sequence token, up to max_new_tokens")


@dataclass
class SamplingConfig:
    """How tokens are sampled; temperature 0 is greedy."""

    temperature: float = knob(0.0, "0 is greedy decoding")
    top_k: int | None = knob(None, "sample from the top_k likeliest tokens; null is all of them")
    top_p: float | None = knob(None, "sample from the smallest set of tokens this likely; null is all of them")


@dataclass
class LoggerConfig:
    """The keys that every logger has; logger=jsonl (files only) has no others."""

    name: str = MISSING


@dataclass
class RunConfig:
    """A whole run. `experiment` and `debug` only set other keys, so they are not part of it."""

    target: TargetConfig = knob(MISSING, "the model whose decoding is to become faster")
    drafter: DrafterConfig = knob(MISSING, "what proposes the draft tokens")
    acceptance: AcceptanceConfig = knob(MISSING, "which draft tokens the target accepts")
    prune: PruneConfig = knob(
        MISSING, "which rows go on after their KV is written: in the drafter, the target's last layer, to logits"
    )
    graph: GraphConfig = knob(MISSING, "what of a round is captured and replayed")
    attention: AttentionConfig = knob(MISSING, "the attention backend")
    workload: WorkloadConfig = knob(MISSING, "the prompts")
    sampling: SamplingConfig = knob(MISSING, "how the target samples")
    logger: LoggerConfig = knob(MISSING, "where the records go")
    tree: TreeConfig = field(
        default_factory=TreeConfig, metadata={"help": "whether a round's drafts are a chain or a tree"}
    )
    verify: VerifyConfig = field(default_factory=VerifyConfig, metadata={"help": "what of the drafts is verified"})
    recurrent: RecurrentConfig = field(
        default_factory=RecurrentConfig, metadata={"help": "the states of layers that keep one"}
    )
    cache: CacheConfig = field(default_factory=CacheConfig, metadata={"help": "the paged KV cache"})
    record: RecordConfig = field(default_factory=RecordConfig, metadata={"help": "what is recorded besides"})
    name: str = knob("run", "first part of the name of the run's folder")
    seed: int = knob(0, "seed of everything random")
    device: str = knob("auto", "auto (CUDA where there is one), cpu, cuda, cuda:1")
    shared_device: bool = knob(False, "jobs of a launcher may share a device, so that times mean nothing: docs/use.md")
    dtype: Dtype = knob(Dtype.auto, "what weights and activations are kept in")
    kernels: KernelsChoice = knob(
        KernelsChoice.auto,
        "what computes acceptance, sampling, draft bookkeeping and RoPE with the KV write; native: layers of few rows",
    )
    row_invariant: bool = knob(
        True,
        "16-bit Triton products, of which a row, of up to 16, does not depend on the others; false: the library's; "
        "no-op without such products",
    )
    batch_size: int = knob(1, "requests decoded together", least=1)
    max_new_tokens: int = knob(160, "longest output of a request, in tokens", least=1)
    references: list[ReferenceChoice] = knob(
        [ReferenceChoice.plain, ReferenceChoice.unpruned], "measured beside the run; [] turns them off"
    )
    repeats: int = knob(5, "timed turns with the references; three or more give an interval", least=1)
    warmup_requests: int = knob(2, "requests decoded before anything is timed", least=0)
    profile_rounds: int = knob(
        16, "rounds profiled after the timed part for the table of kernels; 0 turns it off", least=0
    )
    num_threads: int | None = knob(None, "CPU threads; null is what the target says, and 1 for kernels=native", least=1)
    auto: list[str] = knob([], "which of attention, graph and kernels nobody named; written by the lab")
    extensions: list[str] = knob([], "modules outside this package whose options join those here: docs/extend.md")
    output_dir: str = knob("outputs", "folder in which the run makes its own folder")
    fresh: bool = knob(False, "repeat a sweep that has ended in a new folder; typed again without it, it is only shown")
    leave_out: list[str] = knob([], "cells of a multirun's grid that do not run, 'KEY=VALUE KEY=VALUE' each")
    dry_run: bool = knob(False, "print the composed parts and what would be refused, run nothing; also --dry-run")
