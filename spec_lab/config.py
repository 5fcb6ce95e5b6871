"""The schema of a run: one dataclass per Hydra option, with the type, the default and the explanation of every key.

Values only. A YAML under `conf/` names its schema in its defaults list and sets what that option changes. What may be
combined with what stands in `spec_lab.compatibility`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from spec_lab.bounds import BOUNDS, Bounds


def knob(
    default: Any,
    explanation: str,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
) -> Any:
    """A dataclass field with the line that `--help` prints for it. A list is copied for every instance.

    `spec_lab.bounds` refuses a number under `least`, over `most` or not over `above`; of a list it looks at each entry.
    """
    metadata = {"help": explanation, BOUNDS: Bounds(least, most, above)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class TargetConfig:
    """target=pocket (shipped) or target=hf target.path=DIR."""

    name: str = MISSING
    path: str | None = knob(None, "folder of a Hugging Face checkpoint (Llama, Qwen2 or Qwen3 family); target=hf only")


@dataclass
class DrafterConfig:
    """What every drafter has."""

    name: str = MISSING
    num_draft_tokens: int = knob(3, "draft tokens a round, K; a round verifies K + 1 rows a request")


@dataclass
class NoDrafterConfig(DrafterConfig):
    """drafter=none: plain decoding."""

    name: str = "none"
    num_draft_tokens: int = knob(0, "0: nothing is drafted")


@dataclass
class RandomDrafterConfig(DrafterConfig):
    """drafter=random: uniform tokens, the lower bound."""

    name: str = "random"


@dataclass
class OracleDrafterConfig(DrafterConfig):
    """drafter=oracle: replays a plain continuation recorded before the timed part, the upper bound. Greedy only."""

    name: str = "oracle"


@dataclass
class NgramDrafterConfig(DrafterConfig):
    """drafter=ngram: prompt lookup; the longest suffix of max_ngram..min_ngram tokens seen before, continued."""

    name: str = "ngram"
    max_ngram: int = knob(4, "longest suffix of the text that is looked up, in tokens")
    min_ngram: int = knob(2, "shortest suffix of the text that is looked up, in tokens")


@dataclass
class TrainedDrafterConfig(DrafterConfig):
    """What every drafter with weights has."""

    path: str | None = knob(None, "folder of the drafter's weights; null is what is shipped for the target")
    draft_sampling: str = knob("greedy", "how drafts are picked: greedy, distribution (at sampling.temperature)")


@dataclass
class Eagle3DrafterConfig(TrainedDrafterConfig):
    """drafter=eagle3: a one-layer EAGLE-3 head."""

    name: str = "eagle3"
    window: int | None = knob(None, "newest keys the head's attention sees; null is all of them")


@dataclass
class MtpDrafterConfig(TrainedDrafterConfig):
    """Multi-token prediction modules, as DeepSeek, GLM, MiMo and Qwen ship them. auto is what
    the engines of the family do."""

    target_hidden: str = knob("auto", "the target's hidden state that goes in: auto, pre_norm, post_norm")
    recycled_hidden: str = knob("auto", "the module's own that goes on to the next draft: auto, pre_norm, post_norm")


@dataclass
class MtpEagleDrafterConfig(MtpDrafterConfig):
    """drafter=mtp_eagle: one MTP module, reused for every draft."""

    name: str = "mtp_eagle"


@dataclass
class MtpVanillaDrafterConfig(MtpDrafterConfig):
    """drafter=mtp_vanilla: an MTP module for each draft, over a window of the last tokens."""

    name: str = "mtp_vanilla"


@dataclass
class FrozenKvDrafterConfig(TrainedDrafterConfig):
    """drafter=frozen_kv: queries only, over the target's KV (the Gemma 4 assistant)."""

    name: str = "frozen_kv"
    position: str = knob(
        "last",
        "where every draft step stands: last (SGLang, vLLM), bonus (transformers; its sliding windows are a key wider)",
    )
    topk: int = knob(1, "drafts a step; 1, a chain, is the only one there is")


@dataclass
class DraftModelDrafterConfig(TrainedDrafterConfig):
    """drafter=draft_model: a small language model of its own."""

    name: str = "draft_model"


@dataclass
class AcceptanceConfig:
    """What every acceptance rule has."""

    name: str = MISSING


@dataclass
class StrictAcceptanceConfig(AcceptanceConfig):
    """acceptance=strict: longest prefix equal to the target's argmax, plus one token."""

    name: str = "strict"


@dataclass
class RelaxedThinkingConfig(AcceptanceConfig):
    """acceptance=relaxed_thinking: near misses count while the model thinks. Lossy."""

    name: str = "relaxed_thinking"
    form: str = knob("delta", "how near a draft must be to the likeliest token: delta (p >= p_top1 - delta), ratio")
    topk: int = knob(10, "a draft must be among this many likeliest tokens; 1 is strict")
    delta: float = knob(0.6, "largest difference of probabilities; acceptance.form=delta only")
    ratio: float = knob(0.5, "least ratio of probabilities; acceptance.form=ratio only")
    phase: str = knob("token", "when it relaxes: token (by the markers before each token), round (as TensorRT-LLM)")


@dataclass
class RejectionConfig(AcceptanceConfig):
    """acceptance=rejection: lossless sampling."""

    name: str = "rejection"
    method: str = knob("standard", "standard (reads the draft distribution), one_hot (greedy drafts), block")
    allow_lossy: bool = knob(False, "let standard and block read the head's probabilities of greedy drafts: biased")


@dataclass
class SyntheticConfig(AcceptanceConfig):
    """acceptance=synthetic: set rates, for speed studies; the output is neither model's text."""

    name: str = "synthetic"
    mean_length: float | None = knob(2.5, "acceptance length to impose, 1 to K + 1; null when rates are given")
    rates: list[float] | None = knob(None, "unconditional rate of each draft position, not increasing")


@dataclass
class PruneConfig:
    """prune=none|prefill|post_attention|catchup, or the two knobs by hand."""

    name: str = MISSING
    prefill: str = knob("all_rows", "prompt rows that go on past the KV write: all_rows, last_row")
    catchup: str = knob("none", "where the catch-up step drops its dead rows: none, post_attention, pre_attention")


@dataclass
class GraphConfig:
    """What every graph mode has."""

    name: str = MISSING


@dataclass
class EagerGraphConfig(GraphConfig):
    """graph=eager: nothing is captured."""

    name: str = "eager"


@dataclass
class StepReplayGraphConfig(GraphConfig):
    """graph=step_replay: one draft step captured, its metadata rebuilt on the host between replays (vLLM #41162)."""

    name: str = "step_replay"
    verify: bool = knob(True, "capture the verify forward too, as a graph of its own")


@dataclass
class SplitSeedGraphConfig(GraphConfig):
    """graph=split_seed: first draft step eager, the others in one graph (SGLang before #25539)."""

    name: str = "split_seed"
    verify: bool = knob(True, "capture the verify forward too, as a graph of its own")
    metadata: str = knob("in_place", "between the draft steps of a graph: in_place, stale (wrong on purpose)")


@dataclass
class FullLoopGraphConfig(GraphConfig):
    """graph=full_loop: all draft steps in one graph (SGLang #25539, vLLM #46849)."""

    name: str = "full_loop"
    verify: bool = knob(True, "capture the verify forward too, as a graph of its own")
    metadata: str = knob("in_place", "between the draft steps of a graph: in_place, stale (wrong on purpose)")


@dataclass
class RoundGraphConfig(GraphConfig):
    """graph=round: verify, accept and all draft steps in one graph."""

    name: str = "round"
    overlap: bool = knob(False, "the host reads a round's tokens only after it has launched the next round")
    metadata: str = knob("in_place", "between the draft steps of a graph: in_place, stale (wrong on purpose)")


@dataclass
class AttentionConfig:
    """attention=torch: the reference backend, any device."""

    name: str = "torch"


@dataclass
class CacheConfig:
    """The paged KV cache."""

    page_size: int = knob(16, "tokens a page")
    max_seq_len: int | None = knob(None, "longest sequence, in tokens; null is what the workload needs")
    num_pages: int | None = knob(None, "pages in all; null is enough for batch_size requests of the longest length")
    prefill_chunk: int = knob(512, "prompt rows a forward")


@dataclass
class RecordConfig:
    """What is recorded besides the measurements."""

    topk: int = knob(
        0, "likeliest tokens of each verify row kept for re-scoring, in a pass of its own, 16 say; 0 keeps none"
    )


@dataclass
class WorkloadConfig:
    """workload=pocket (shipped prompts), generated, jsonl, spec_bench, fixed_length, random_ids."""

    name: str = MISSING
    limit: int | None = knob(None, "prompts a run, taken in turn from the categories; null is all of them")
    categories: list[str] | None = knob(None, "categories to take prompts from; null is all of them")
    path: str | None = knob(None, "JSON Lines file with the prompts; workload=jsonl and spec_bench only")
    prompt_tokens: int | None = knob(None, "tokens a prompt; workload=fixed_length and random_ids only")
    per_category: int | None = knob(None, "prompts drawn of each category; workload=generated only")
    num_requests: int | None = knob(None, "how many requests; workload=fixed_length and random_ids only")
    ignore_eos: bool = knob(False, "decode on past the end-of-sequence token, up to max_new_tokens")


@dataclass
class SamplingConfig:
    """temperature 0 is greedy."""

    temperature: float = knob(0.0, "0 is greedy decoding")
    top_k: int | None = knob(None, "sample from the top_k likeliest tokens; null is all of them")
    top_p: float | None = knob(None, "sample from the smallest set of tokens this likely; null is all of them")


@dataclass
class LoggerConfig:
    """logger=jsonl (files only) or wandb (files, and W&B online or offline)."""

    name: str = MISSING
    project: str = knob("spec_lab", "W&B project; logger=wandb only")
    entity: str | None = knob(None, "W&B user or team; null is the one of the key; logger=wandb only")
    mode: str = knob("auto", "auto (online with a key, else offline), online, offline, disabled; logger=wandb only")
    group: str | None = knob(None, "W&B group; null is the sweep's name; logger=wandb only")


@dataclass
class RunConfig:
    """A whole run. `experiment` and `debug` only set other keys, so they are no part of it."""

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
    cache: CacheConfig = field(default_factory=CacheConfig, metadata={"help": "the paged KV cache"})
    record: RecordConfig = field(default_factory=RecordConfig, metadata={"help": "what is recorded besides"})
    name: str = knob("run", "first part of the name of the run's folder")
    seed: int = knob(0, "seed of everything random")
    device: str = knob("auto", "auto (CUDA where there is one), cpu, cuda, cuda:1")
    dtype: str = knob("auto", "auto (float32 on a CPU, else bfloat16), float32, bfloat16, float16")
    kernels: str = knob(
        "torch",
        "what computes acceptance, sampling, draft bookkeeping and RoPE with the KV write: torch, triton (a GPU, or "
        "TRITON_INTERPRET=1)",
    )
    batch_size: int = knob(1, "requests decoded together")
    max_new_tokens: int = knob(160, "longest output of a request, in tokens")
    references: list[str] = knob(
        ["plain", "unpruned"], "measured beside the run: plain (no drafter), unpruned (no pruning); [] turns them off"
    )
    repeats: int = knob(3, "timed repeats, interleaved with the references")
    warmup_requests: int = knob(2, "requests decoded before anything is timed")
    profile_rounds: int = knob(16, "rounds profiled after the timed part for the table of kernels; 0 turns it off")
    num_threads: int | None = knob(None, "CPU threads of torch; null leaves torch's choice")
    output_dir: str = knob("outputs", "folder in which the run makes its own folder")
    dry_run: bool = knob(False, "print the composed parts and what would be refused, run nothing; also --dry-run")


SCHEMAS: dict[str, type] = {
    "run": RunConfig,
    "target": TargetConfig,
    "drafter/none": NoDrafterConfig,
    "drafter/eagle3": Eagle3DrafterConfig,
    "drafter/mtp_eagle": MtpEagleDrafterConfig,
    "drafter/mtp_vanilla": MtpVanillaDrafterConfig,
    "drafter/frozen_kv": FrozenKvDrafterConfig,
    "drafter/draft_model": DraftModelDrafterConfig,
    "drafter/ngram": NgramDrafterConfig,
    "drafter/oracle": OracleDrafterConfig,
    "drafter/random": RandomDrafterConfig,
    "acceptance/strict": StrictAcceptanceConfig,
    "acceptance/relaxed_thinking": RelaxedThinkingConfig,
    "acceptance/rejection": RejectionConfig,
    "acceptance/synthetic": SyntheticConfig,
    "prune": PruneConfig,
    "graph/eager": EagerGraphConfig,
    "graph/split_seed": SplitSeedGraphConfig,
    "graph/step_replay": StepReplayGraphConfig,
    "graph/full_loop": FullLoopGraphConfig,
    "graph/round": RoundGraphConfig,
    "attention": AttentionConfig,
    "workload": WorkloadConfig,
    "sampling": SamplingConfig,
    "logger": LoggerConfig,
}


def register_schemas() -> None:
    """Make every schema known to Hydra as `/schema/NAME`, a group of its own so that none shows up as an option."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    for path, schema in SCHEMAS.items():
        group, _, name = f"schema/{path}".rpartition("/")
        store.store(group=group, name=name, node=schema)
