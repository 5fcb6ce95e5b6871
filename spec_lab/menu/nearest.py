"""Finds the name that the user may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LEAST_LIKE = 0.68
"""How alike two spellings must be, from 0 to 1. It is high enough that `system` is not suggested for `temp`, nor
`page_size` for `ngram_size`."""
ELSEWHERE = {
    "drafter.model": "drafter.path",
    "model": "target.path",
    "model_path": "target.path",
    "method": "drafter",
    "assistant_model": "drafter.path",
    "gamma": "drafter.num_draft_tokens",
    "lookahead": "drafter.num_draft_tokens",
    "draft_length": "drafter.num_draft_tokens",
    "num_assistant_tokens": "drafter.num_draft_tokens",
    "prompt_lookup_num_tokens": "drafter.num_draft_tokens",
    "ngram_size": "drafter.max_ngram",
    "dataset": "workload",
    "num_prompts": "workload.limit",
    "num_samples": "workload.limit num_texts",
    "precision": "dtype",
    "speculative_model": "drafter.path",
    "speculative_draft_model_path": "drafter.path",
    "speculative_algorithm": "drafter",
    "num_steps": "drafter.num_draft_tokens",
    "speculative_num_steps": "drafter.num_draft_tokens",
    "max_draft_len": "drafter.num_draft_tokens",
    "prompt_lookup_max": "drafter.max_ngram",
    "prompt_lookup_min": "drafter.min_ngram",
    "draft_sample_method": "drafter.draft_sampling",
    "rejection_sample_method": "acceptance.method",
    "relaxed_topk": "acceptance.topk",
    "relaxed_delta": "acceptance.delta",
    "speculative_eagle_topk": "tree.topk",
    "speculative_num_draft_tokens": "tree.num_rows",
    "enforce_eager": "graph",
    "max_num_seqs": "batch_size",
    "max_running_requests": "batch_size",
    "max_model_len": "cache.max_seq_len",
    "context_length": "cache.max_seq_len",
    "tensor_parallel_size": "target.tensor_parallel",
    "tp_size": "target.tensor_parallel",
}
"""Keys and groups, by the names that other engines and papers use. If there are two, each program has only one of them.
docs/from_other_engines.md has most of these names."""
VERY_LIKE = 0.85
"""How alike a key of the typed group must be to be preferred to a key of another group with exactly the typed name."""


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that `word` means: one that ends in it (`limit` for workload.limit), one that another engine
    calls `word`, or one with a similar spelling. None if there is none."""
    names = list(names)
    leaves = {name.rpartition(".")[2]: name for name in reversed(names)}
    group, _, leaf = word.rpartition(".")
    # Keys of the typed group are compared without the group's name, since equal beginnings would hide that the rest
    # differs.
    siblings = {name.rpartition(".")[2]: name for name in names if group and name.rpartition(".")[0] == group}
    meant = [name for typed in (word, leaf) for name in ELSEWHERE.get(typed, "").split() if name in names]
    if word in ELSEWHERE and meant:
        return meant[0]
    if very_like := get_close_matches(leaf, siblings, n=1, cutoff=VERY_LIKE):
        return siblings[very_like[0]]
    if leaf in leaves:
        return leaves[leaf]
    if meant:
        return meant[0]
    others = {name: name for name in names if name not in (group, *siblings.values())}
    if siblings:  # a key of another group does something else, however alike
        leaves = {name: name for name in names if "." not in name}
    for typed, candidates in ((leaf, siblings), (word, others), (leaf, leaves)):
        close = get_close_matches(typed, candidates, n=1, cutoff=LEAST_LIKE)
        if close:
            return candidates[close[0]]
    return None


def one_of(key: str, values: Iterable[str]) -> str:
    """Return an override that can be typed, followed by the other values: `drafter=eagle3 (or ngram, oracle)`."""
    first, *others = values
    return f"{key}={first} (or {', '.join(others)})" if others else f"{key}={first}"


def hint(near: str | None) -> str:
    """Return the end of a sentence that refuses a name, with a suggestion if there is one."""
    return f"; did you mean {near}?" if near else "; see --help"
