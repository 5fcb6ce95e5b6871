"""Finds the name that the user may have meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches

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
    "num_samples": "workload.limit num_texts writing.num_texts",
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
    "num_gpus": "target.tensor_parallel",
    "draft_tensor_parallel_size": "",
    "drafter.method": "drafter",
    "drafter.model_path": "drafter.path",
    "drafter.topk": "tree.topk",
    "drafter.confidence_threshold": "drafter.stop_threshold",
    "num_speculative_tokens": "drafter.num_draft_tokens",
    "speculative_tokens": "drafter.num_draft_tokens",
    "num_drafts": "drafter.num_draft_tokens",
    "tree_width": "tree.topk",
    "tree.width": "tree.topk",
    "cache.prefill": "cache.prefill_chunk",
    "draft_len": "drafter.num_draft_tokens",
    "spec_tokens": "drafter.num_draft_tokens",
    "num_spec_tokens": "drafter.num_draft_tokens",
    "max_total_draft_tokens": "tree.num_rows",
    "posterior_threshold": "acceptance.epsilon",
    "accept_threshold": "",
    "max_num_batched_tokens": "cache.prefill_tokens",
    "cache.block_size": "cache.page_size",
    "cache.pages": "cache.num_pages",
    "cache.max_length": "cache.max_seq_len",
    "cache.chunk_size": "cache.prefill_chunk",
    "max_tokens": "max_new_tokens",
    "min_tokens": "",
    "max_length": "max_new_tokens",
    "generation_length": "max_new_tokens",
    "output_len": "max_new_tokens",
    "num_beams": "",
    "num_runs": "repeats",
    "num_iters": "repeats",
    "profile": "profile_rounds",
    "dataset_path": "workload.path",
    "prompt": "workload",
    "prompts": "workload",
    "workload.prompts": "workload.path",
    "workload.size": "workload.limit",
    "tree.size": "tree.num_rows",
    "cache.size": "cache.num_pages",
    "workload.category": "workload.categories",
    "logger.run": "name",
    "recurrent.mode": "recurrent.rollback",
    "drafter.vocab_size": "drafter.draft_vocab_size",
    "num_hidden_layers": "drafter.num_layers",
    "ttt_length": "drafter.num_unrolled_steps",
    "lr": "drafter.optimisation.peak_learning_rate",
    "learning_rate": "drafter.optimisation.peak_learning_rate",
    "save_steps": "drafter.optimisation.checkpoint_every",
    "eval_steps": "evaluation.every",
    "max_steps": "drafter.optimisation.num_steps",
    "warmup_steps": "drafter.optimisation.num_warmup_steps",
}
"""Keys and groups, by the names that other engines, papers and users give them. Of several keys in a text, the first
that the program has is meant. An empty text means that nothing here is meant, however alike the spelling."""
KINDS = ("mode", "type", "kind")
"""Last parts of a name that mean the option of their group: `graph.mode` means `graph`, and not logger.mode."""
COUNTED = "num_"
VERY_LIKE = 0.85
"""How alike a key of the typed group must be to win over a key of another group that has the typed last part."""


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that `word` means: one that ends in it (`limit` for workload.limit), one that another engine
    calls `word`, or one with a similar spelling. None if there is none."""
    names = list(names)
    word = _in_known_group(word, names)
    leaves = {name.rpartition(".")[2]: name for name in reversed(names)}
    group, _, leaf = word.rpartition(".")
    # Keys of the typed group are compared without the group's name, since equal beginnings would hide that the rest
    # differs.
    siblings = {name.rpartition(".")[2]: name for name in names if group and name.rpartition(".")[0] == group}
    if word in ELSEWHERE and (not ELSEWHERE[word] or _elsewhere(word, names)):
        return _elsewhere(word, names)
    if very_like := get_close_matches(leaf, siblings, n=1, cutoff=VERY_LIKE):
        return siblings[very_like[0]]
    if leaf in KINDS and group in names:
        return group
    if leaf in leaves and (not siblings or leaf != "size"):
        return leaves[leaf]
    if meant := _elsewhere(leaf, names):
        return siblings.get(meant.rpartition(".")[2], meant)
    others = {name: name for name in names if name != group}
    # A key of another group does something else, however alike.
    fits = [(leaf, siblings)] if siblings else [(word, others), (leaf, leaves)]
    for typed, candidates in fits:
        close = get_close_matches(typed, candidates, n=1, cutoff=LEAST_LIKE)
        if close and _alike_behind(COUNTED, typed, close[0]):
            return candidates[close[0]]
    return None


def _in_known_group(word: str, names: Sequence[str]) -> str:
    """Return `word` with the group that it means, or without its group if no known group is like it."""
    group, _, leaf = word.rpartition(".")
    groups = {part for name in names for part in (name.rpartition(".")[0], name.partition(".")[0])} - {""}
    if not group or not groups or group in groups:
        return word
    if ends_alike := [name for name in names if name.endswith(f".{word}")]:
        return ends_alike[0]
    close = get_close_matches(group, sorted(groups), n=1, cutoff=LEAST_LIKE)
    return f"{close[0]}.{leaf}" if close else leaf


def _alike_behind(beginning: str, typed: str, found: str) -> bool:
    """Return whether two spellings are alike without a beginning that both have, which would hide a difference."""
    rests = [name.rpartition(".")[2].removeprefix(beginning) for name in (typed, found)]
    begin_alike = all(name.rpartition(".")[2].startswith(beginning) for name in (typed, found))
    return not begin_alike or SequenceMatcher(None, rests[0], rests[1]).ratio() >= LEAST_LIKE


def _elsewhere(word: str, names: Sequence[str]) -> str | None:
    return next((name for name in ELSEWHERE.get(word, "").split() if name in names), None)


def one_of(key: str, values: Iterable[str]) -> str:
    """Return an override that can be typed, followed by the other values: `drafter=eagle3 (or ngram, oracle)`."""
    first, *others = values
    return f"{key}={first} (or {', '.join(others)})" if others else f"{key}={first}"


def hint(near: str | None) -> str:
    """Return the end of a sentence that refuses a name, with a suggestion if there is one."""
    return f"; did you mean {near}?" if near else "; see --help"
