"""A whole run: a part of each group of options (`spec_lab.config.groups`), and all other keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_type_hints

from omegaconf import MISSING

from spec_lab.config.choices import CacheDtype, DraftSampling, Dtype, KernelsChoice, ReferenceChoice, Rollback
from spec_lab.config.groups import (
    AcceptanceConfig,
    AttentionConfig,
    DrafterConfig,
    EngineConfig,
    GraphConfig,
    LoggerConfig,
    TargetConfig,
    TreeConfig,
    TreeSizes,
    WorkloadConfig,
)
from spec_lab.config.option import Part, knob, option


@option("prune", "none")
class PruneConfig(Part):
    """prune=none: every row goes through every layer. The other options set the two knobs otherwise."""

    name: str = "none"

    prefill: str = knob("all_rows", "prompt rows that go on past the KV write")
    catchup: str = knob("none", "where the catch-up step drops the verified rows whose outputs nobody needs")


@option("sampling", "greedy")
class SamplingConfig(Part):
    """sampling=greedy: takes the likeliest token every time."""

    name: str = "greedy"

    temperature: float = knob(0.0, "0 is greedy decoding", least=0)
    top_k: int | None = knob(None, "sample from the top_k likeliest tokens; null is all of them", least=1)
    top_p: float | None = knob(
        None, "sample from the smallest set of tokens with this probability; null is all of them", above=0, most=1
    )


@option("sampling", "sampled")
class Sampled(SamplingConfig):
    """Samples from the target's distribution, at temperature 1."""

    temperature: float = knob(1.0, "0 is greedy decoding", least=0)


@dataclass
class RecurrentConfig:
    """Keys for layers that keep a state, such as gated delta nets; a no-op for other targets."""

    rollback: Rollback = knob(Rollback.checkpoints, "how rejected drafts are removed from a state")


@dataclass
class CacheConfig:
    """The paged KV cache."""

    dtype: CacheDtype = knob(CacheDtype.auto, "type of the target's keys and values")
    drafter_dtype: CacheDtype = knob(CacheDtype.auto, "type of the drafter's own keys and values")
    page_size: int = knob(16, "tokens a page", least=1)
    max_seq_len: int | None = knob(None, "longest sequence, in tokens; null is the longest of the workload")
    num_pages: int | None = knob(
        None, "total number of pages; null is enough for batch_size requests of the longest length"
    )
    prefill_chunk: int | None = knob(
        None,
        "most prompt rows of one request in a forward; null is 512, or 8192 on CUDA with attention=triton and not "
        "acceptance.phase=round",
        least=1,
    )
    prefill_tokens: int | None = knob(
        None,
        "most prompt rows of several requests in a forward, 1 is one request a forward; null is 1 with kernels=native, "
        "else 8192 on CUDA and 2048 on a CPU",
        least=1,
    )

    @property
    def chunk_size(self) -> int:
        """The value of `prefill_chunk`, which is a number once `build.auto` has seen the run."""
        assert self.prefill_chunk is not None, "chosen by spec_lab.build.auto"
        return self.prefill_chunk


@dataclass
class RecordConfig:
    """The records that are made in addition to the measurements."""

    topk: int = knob(
        0,
        "likeliest tokens of each verify row to keep for re-scoring, such as 16; decodes once more for it; 0 is none",
        least=0,
        most=128,
    )
    confidences: bool = knob(
        False, "keep the drafter's confidence in each offered draft of a chain; drafter.plan=cost then reads it too"
    )
    audit: bool = knob(True, "check the outputs by the target's own forward; false for a run that only writes texts")


@dataclass
class StudyConfig:
    """What a study's runs show: `spec_lab.study.studies` explains the keys."""

    question: str | None = knob(None, "what the study asks")
    lines: dict[str, Any] = knob({}, "overrides of each line, by name: what `line=NAME` stands for")
    keys: dict[str, str] = knob({}, "what names a row of the table: column of the frame by header")
    columns: dict[str, str] = knob({}, "numbers of a row: column of the frame by header")
    across: str | None = knob(None, "a key whose values become columns")
    plot: dict[str, Any] = knob({}, "x, y, hue and even of the figure")
    tables: list[str] = knob([], "tables that are printed; [] is the one of keys and columns")
    figures: list[str] = knob([], "figures that are drawn; [] is the plot")


@dataclass
class Run:
    """A whole run. `experiment`, `line` and `debug` only set other keys, so they are not part of it."""

    target: TargetConfig = knob(MISSING, "the model whose decoding is to become faster")
    drafter: DrafterConfig = knob(MISSING, "what proposes the draft tokens")
    acceptance: AcceptanceConfig = knob(MISSING, "which draft tokens the target accepts")
    prune: PruneConfig = knob(MISSING, "which rows go on after their KV is written, in the drafter and in the target")
    graph: GraphConfig = knob(MISSING, "which parts of a round are captured and replayed")
    attention: AttentionConfig = knob(MISSING, "the attention backend")
    workload: WorkloadConfig = knob(MISSING, "the prompts")
    sampling: SamplingConfig = knob(MISSING, "how the target samples")
    logger: LoggerConfig = knob(MISSING, "where the records go")
    tree: TreeConfig = knob(TreeConfig, "whether a round's drafts are a chain or a tree")
    engine: EngineConfig = knob(EngineConfig, "what decodes: the lab, or another engine beside it")
    recurrent: RecurrentConfig = knob(RecurrentConfig, "layers that keep a state")
    cache: CacheConfig = knob(CacheConfig, "the paged KV cache")
    record: RecordConfig = knob(RecordConfig, "what is recorded besides")
    study: StudyConfig = knob(StudyConfig, "what a study's runs show")
    size: str = knob("small", "small or full, which studies read")
    name: str = knob("run", "first part of the name of the run's folder")
    seed: int = knob(0, "seed of everything random")
    device: str = knob("auto", "auto (CUDA where there is one), cpu, cuda, cuda:1")
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
    fixed_k: list[int] = knob(
        [], "numbers of drafts, up to K, that take turns too: k3 is the same run with 3 in every round", least=1
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
    extensions: list[str] = knob([], "modules outside this package that add options: docs/extend.md")
    output_dir: str = knob("outputs", "folder in which runs and sweeps make their folders")
    objective: str = knob("summary.speedup", "the number that a job returns to a sweeper that searches")

    @property
    def sizes(self) -> TreeSizes | None:
        """The sizes of the run's tree; None if its drafts are a chain."""
        return self.tree.sizes

    @property
    def draws_drafts(self) -> bool:
        """Whether its drafts are sampled."""
        return getattr(self.drafter, "draft_sampling", DraftSampling.greedy) != DraftSampling.greedy

    @property
    def fewer_drafts(self) -> str | None:
        """The override by which a request may offer fewer than K drafts; None if all are offered."""
        if self.drafter.plan != "none" and self.drafter.drafts:
            return f"drafter.plan={self.drafter.plan}"
        return f"drafter={self.drafter.name}" if self.drafter.drafts_on_host else None


GROUPS = tuple(name for name, kind in get_type_hints(Run).items() if isinstance(kind, type) and issubclass(kind, Part))
"""The groups of which a run chooses an option."""
