"""The schema of a run: the type, the default and the explanation of every key.

This module builds nothing. The additional keys of one option (`acceptance.topk`, `drafter.window`) are in a subclass in
the option's module in `spec_lab.options`. A YAML file under `conf/` names its schema in its defaults list, and sets the
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
    number.
    """
    metadata = {"help": explanation, BOUNDS: Bounds(least, most, above)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class TargetConfig:
    """target=pocket or another shipped or packaged model, target=hf target.path=DIR, or the shape of a known model."""

    name: str = MISSING
    path: str | None = knob(
        None, "folder of a Hugging Face checkpoint (families: docs/families.md), or with target=hf a GGUF file"
    )
    weights: Weights = knob(Weights.checkpoint, "where the weights come from")
    weight_dtype: WeightDtype = knob(
        WeightDtype.auto,
        "type in which the linear layers' weights are stored; fp8 leaves embedding, head and drafter in dtype",
    )
    tensor_parallel: int = knob(1, "number of torchrun processes that the layers are split over", least=1)


@dataclass
class DrafterConfig:
    """The keys that every drafter has."""

    name: str = MISSING
    num_draft_tokens: int = knob(3, "draft tokens a round, K; a round of a chain verifies at most K + 1 rows a request")
    k_schedule: list[list[int]] | None = knob(
        None,
        "K by the number of running requests, a list of [first, last, K]; null is num_draft_tokens for every number",
    )
    by_request: ByRequest = knob(
        ByRequest.same, "what determines the K of a request, which is at most num_draft_tokens"
    )
    off_below: float = knob(
        0.0,
        "a request stops drafting if its mean of accepted drafts is below this; by_request=acceptance only; 0 is never",
        least=0,
    )


@dataclass
class TrainedDrafterConfig(DrafterConfig):
    """The keys that every drafter with weights has."""

    path: str | None = knob(None, "folder of the drafter's weights; null is the one shipped for the target")
    draft_sampling: DraftSampling = knob(DraftSampling.greedy, "how drafts are picked")
    stop: DraftStop = knob(DraftStop.none, "what ends a request's drafting")
    stop_threshold: float = knob(
        0.4,
        "a request drafts on while the product of top-1 probabilities, or a head's estimate, is at least this; "
        "drafter.stop=confidence only",
        above=0,
        most=1,
    )
    confidence_temperatures: list[float] | None = knob(
        None, "a temperature for the confidence in each draft; null leaves confidences unchanged", above=0
    )


@dataclass
class AcceptanceConfig:
    """The keys that every acceptance rule has."""

    name: str = MISSING
    lossless_only: bool = knob(
        False, "refuse every rule that may change the output; for outputs that a model will be trained on"
    )


@dataclass
class TreeConfig:
    """tree=none: a round's drafts are a chain. Options with trees have additional keys."""

    name: str = "none"


@dataclass
class PruneConfig:
    """prune=none|prefill|post_attention|catchup. The options only set the two knobs, which can also be set directly."""

    prefill: str = knob("all_rows", "prompt rows that go on past the KV write")
    catchup: str = knob("none", "where the catch-up step drops the verified rows whose outputs nobody needs")


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
    """The keys that every attention backend has. A config made in code has attention=torch, the
    reference; a run's default is attention=auto."""

    name: str = "torch"


@dataclass
class VerifyConfig:
    """The limit on the rows that are verified."""

    budget: int | None = knob(
        None,
        "verify rows a round for the whole batch, given to the drafts likeliest to be accepted; null is all rows",
        least=2,
    )


@dataclass
class RecurrentConfig:
    """Keys for layers that keep a state, such as gated delta nets; a no-op for other targets."""

    rollback: Rollback = knob(Rollback.checkpoints, "how rejected drafts are removed from a state")


@dataclass
class CacheConfig:
    """The paged KV cache."""

    page_size: int = knob(16, "tokens a page", least=1)
    max_seq_len: int | None = knob(None, "longest sequence, in tokens; null is the longest of the workload")
    num_pages: int | None = knob(
        None, "total number of pages; null is enough for batch_size requests of the longest length"
    )
    prefill_chunk: int | None = knob(
        None,
        "most prompt rows of one request in a forward; null is 512, or 8192 on CUDA with attention=triton and not "
        "acceptance.phase=round; a prefill_tokens above 1 lowers it",
        least=1,
    )
    prefill_tokens: int | None = knob(
        None,
        "most prompt rows of all requests in a forward; 1 is one request a forward; null is 1 with kernels=native, "
        "else 8192 on CUDA and 2048 on a CPU, at least prefill_chunk",
        least=1,
    )

    @property
    def chunk_size(self) -> int:
        """Return the value of `prefill_chunk`, which is a number once a run is composed."""
        assert self.prefill_chunk is not None, "chosen by spec_lab.menu.auto"
        return self.prefill_chunk


@dataclass
class RecordConfig:
    """The records that are made in addition to the measurements."""

    topk: int = knob(
        0,
        "likeliest tokens of each verify row to keep for re-scoring, such as 16; decodes once more for it; 0 is none",
        least=0,
    )
    audit: bool = knob(True, "check the outputs by the target's own forward; false for a run that only writes texts")


@dataclass
class WorkloadConfig:
    """workload=pocket (shipped prompts), jsonl, spec_bench, reasoning_gym, user_turns, outputs, fixed_length,
    random_ids."""

    name: str = MISSING
    limit: int | None = knob(None, "number of prompts, taken from the categories in turn; null is all of them", least=1)
    categories: list[str] | None = knob(None, "categories to take prompts from; null is all of them")
    path: str | None = knob(None, "JSON Lines file with the prompts (jsonl, spec_bench), or folder of a run (outputs)")
    prompt_tokens: int | None = knob(
        None, "tokens of each prompt; workload=fixed_length and random_ids only", most=10**7, least=1
    )
    per_category: int | None = knob(
        None, "number of prompts of each category; workload=reasoning_gym only", most=10**4, least=1
    )
    tasks: list[str] | None = knob(None, "tasks of reasoning_gym, each a category; workload=reasoning_gym only")
    turns: int | None = knob(
        None,
        "number of turns of a conversation that are asked; null is all of them; workload=jsonl and spec_bench only",
        least=1,
    )
    system: str | None = knob(None, "system prompt of chats whose line has none; null means none")
    unusable: Unusable = knob(
        Unusable.refuse, "what happens if a line of the file is broken, or a prompt is too long for the target"
    )
    num_requests: int | None = knob(
        None, "number of requests; workload=user_turns, fixed_length and random_ids only", most=10**6, least=1
    )
    checker: str = knob("answer", "how the answer is read from an output; a prompt of a file may name its own")
    ignore_eos: bool = knob(False, "continue after the end-of-sequence token, up to max_new_tokens")


@dataclass
class SamplingConfig:
    """The sampling of tokens; temperature 0 is greedy."""

    temperature: float = knob(0.0, "0 is greedy decoding")
    top_k: int | None = knob(None, "sample from the top_k likeliest tokens; null is all of them")
    top_p: float | None = knob(
        None, "sample from the smallest set of tokens with this probability; null is all of them"
    )


@dataclass
class LoggerConfig:
    """The keys that every logger has; logger=jsonl (files only) has no others."""

    name: str = MISSING


@dataclass
class RunConfig:
    """A whole run. `experiment`, `debug` and `size` only set other keys, so they are not part of it."""

    target: TargetConfig = knob(MISSING, "the model whose decoding is to become faster")
    drafter: DrafterConfig = knob(MISSING, "what proposes the draft tokens")
    acceptance: AcceptanceConfig = knob(MISSING, "which draft tokens the target accepts")
    prune: PruneConfig = knob(MISSING, "which rows go on after their KV is written, in the drafter and in the target")
    graph: GraphConfig = knob(MISSING, "which parts of a round are captured and replayed")
    attention: AttentionConfig = knob(MISSING, "the attention backend")
    workload: WorkloadConfig = knob(MISSING, "the prompts")
    sampling: SamplingConfig = knob(MISSING, "how the target samples")
    logger: LoggerConfig = knob(MISSING, "where the records go")
    tree: TreeConfig = field(
        default_factory=TreeConfig, metadata={"help": "whether a round's drafts are a chain or a tree"}
    )
    verify: VerifyConfig = field(default_factory=VerifyConfig, metadata={"help": "which drafts are verified"})
    recurrent: RecurrentConfig = field(default_factory=RecurrentConfig, metadata={"help": "layers that keep a state"})
    cache: CacheConfig = field(default_factory=CacheConfig, metadata={"help": "the paged KV cache"})
    record: RecordConfig = field(default_factory=RecordConfig, metadata={"help": "what is recorded besides"})
    name: str = knob("run", "first part of the name of the run's folder")
    seed: int = knob(0, "seed of everything random")
    device: str = knob("auto", "auto (CUDA where there is one), cpu, cuda, cuda:1")
    shared_device: bool = knob(
        False, "jobs of a launcher may share a device, which makes times meaningless: docs/use.md"
    )
    dtype: Dtype = knob(Dtype.auto, "type of weights and activations")
    kernels: KernelsChoice = knob(
        KernelsChoice.auto,
        "kernels for acceptance, sampling, draft bookkeeping, and RoPE with the KV write; triton (16 bits) and native "
        "also compute layers of few rows",
    )
    row_invariant: bool = knob(
        True,
        "with kernels=triton in 16 bits, products of up to 16 rows by kernels whose rows do not depend on the batch; "
        "false uses the library's",
    )
    batch_size: int = knob(1, "requests decoded together", least=1)
    max_new_tokens: int = knob(160, "longest output of a request, in tokens", least=1)
    references: list[ReferenceChoice] = knob(
        [ReferenceChoice.plain, ReferenceChoice.unpruned], "configurations that take turns with the run; [] is none"
    )
    repeats: int = knob(5, "times that run and references are timed in turn; three or more give an interval", least=1)
    warmup_requests: int = knob(
        2, "requests decoded before anything is timed, at least a full batch; 0 is none", least=0
    )
    profile_rounds: int = knob(
        16, "number of rounds profiled after the timed part, for the table of kernels; 0 is none", least=0
    )
    num_threads: int | None = knob(
        None, "number of CPU threads; null is the target's default, and 1 for kernels=native", least=1
    )
    auto: list[str] = knob([], "the knobs among attention, graph and kernels that the lab chose; written by the lab")
    extensions: list[str] = knob([], "modules outside this package that add options: docs/extend.md")
    output_dir: str = knob("outputs", "folder in which the run makes its own folder")
    fresh: bool = knob(False, "repeat an ended sweep in a new folder; without it the same command only shows the sweep")
    leave_out: list[str] = knob([], "cells of a multirun's grid that are left out, each as 'KEY=VALUE KEY=VALUE'")
    dry_run: bool = knob(False, "print the composed parts and the refusals, and run nothing; also --dry-run")
