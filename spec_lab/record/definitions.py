"""The definition of every number a run reports, from the functions that compute it. Each run records all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from spec_lab.record.acceptance_metrics import (
    acceptance_length,
    acceptance_length_all,
    acceptance_rate_by_position,
    accepted_histogram,
    distance,
    emitted_histogram,
    expert_bytes_read,
    experts_read,
    num_emitted_tokens,
    num_output_tokens,
    num_request_rounds,
    parts,
    relaxed_hits,
    rows,
)
from spec_lab.record.answer_metrics import accuracy, accuracy_change, answers_cut, equal_share, thinking
from spec_lab.record.time_metrics import (
    break_even_acceptance_length,
    decode_tokens_per_second,
    end_to_end_latency_ms,
    end_to_end_tokens_per_second,
    gpu_idle_share,
    inter_token_latency_ms,
    latency,
    launch_ms,
    paired_ratio,
    prefill_ms_per_request,
    round_ms,
    stage_ms,
    time_per_output_token_ms,
    time_to_first_token_ms,
)


def _first_paragraph(function: Callable[..., object]) -> str:
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())


DEFINITIONS: dict[str, str] = {
    "acceptance_length": _first_paragraph(acceptance_length),
    "acceptance_length_all": _first_paragraph(acceptance_length_all),
    "acceptance_rate_by_position": _first_paragraph(acceptance_rate_by_position),
    "acceptance_rate_by_position.unconditional": (
        "Share of all rounds, whatever they offered; 1 + their sum is acceptance_length. Where every round offers K "
        "drafts, the product of the conditional rates up to the position."
    ),
    "acceptance_rate_by_position.conditional": "Over the drafts that were offered and reached at the position.",
    "acceptance_rate_by_position.reached": (
        "Drafts that were offered and reached at the position: every earlier one was accepted, and none was an end of "
        "sequence."
    ),
    "accepted_histogram": _first_paragraph(accepted_histogram),
    "emitted_histogram": _first_paragraph(emitted_histogram),
    "num_draft_tokens": (
        "K: the most drafts a request that a round can offer; of a tree, those on its longest path. How many were "
        "offered is rows.offered."
    ),
    "tree_rows": (
        "Rows a request that a round verifies where its drafts are a tree: the pending token and all drafts. Null for "
        "a chain, which has num_draft_tokens + 1."
    ),
    "num_requests": "Requests of the workload.",
    "rounds": _first_paragraph(num_request_rounds),
    "verify_calls": (
        "Rounds: target verifies, each of which serves a batch of requests; surplus rounds count. A surplus round was "
        "launched, under graph.overlap, before the host knew that the round before had ended all its requests: it "
        "emits nothing, and its time and its rows count."
    ),
    "wasted_rounds": (
        "Rounds that graph.rounds_per_replay had launched together with others, and that ran when all their requests "
        "had ended. They have no line and no rows, and their time is in that of the others; those that "
        "graph.skip_ended kept from running do not count. Of the first repeat."
    ),
    "emitted_tokens": _first_paragraph(num_emitted_tokens),
    "output_tokens": _first_paragraph(num_output_tokens),
    "decode_tokens_per_second": _first_paragraph(decode_tokens_per_second),
    "end_to_end_tokens_per_second": _first_paragraph(end_to_end_tokens_per_second),
    "speedup": _first_paragraph(paired_ratio),
    "pruning_speedup": "The same over the reference without pruning: what pruning saved.",
    "break_even_acceptance_length": _first_paragraph(break_even_acceptance_length),
    "round_ms": _first_paragraph(round_ms),
    "launch_ms": _first_paragraph(launch_ms),
    "stage_ms_per_round": _first_paragraph(stage_ms),
    "stage_ms_per_round.commit": "The device's bookkeeping.",
    "stage_ms_per_round.lookup": "The host looks drafts up and copies them to the device, which waits (suffix).",
    "stage_ms_per_round.readback": "Tokens and counts packed into one tensor and copied; on a CPU read as well.",
    "prefill_ms_per_request": _first_paragraph(prefill_ms_per_request),
    "prompt_forwards": (
        "Forwards of the target over prompts in a repeat, each over chunks of one request or of several "
        "(cache.prefill_tokens)."
    ),
    "latency_ms": _first_paragraph(latency),
    "latency_ms.ttft": _first_paragraph(time_to_first_token_ms),
    "latency_ms.tpot": _first_paragraph(time_per_output_token_ms),
    "latency_ms.itl": _first_paragraph(inter_token_latency_ms),
    "latency_ms.e2e": _first_paragraph(end_to_end_latency_ms),
    "rows": _first_paragraph(rows),
    "rows.drafted": (
        "Drafts that the draft steps of rounds made, offered or not, those of padded and surplus rows included; the "
        "prompt pass's are not in it. Of a tree its rows but for the root. Places for which ngram finds nothing "
        "count, in a chain and in a tree; of suffix those that it found."
    ),
    "rows.offered": (
        "Drafts that verification could accept. Fewer than were drafted where drafter.stop, drafter.k_schedule or "
        "verify.budget leave some out. Places for which ngram finds nothing count here too."
    ),
    "rows.verified": (
        "Rows of the target's verify: pending tokens and drafts, those that are not offered and fill the shape, padded "
        "and surplus rows included."
    ),
    "rows.catchup_computed": (
        "Rows the passes of the drafter's catch-up step carried past the KV write, padded and surplus rows included; "
        "mtp_vanilla has a pass for each draft, the others one."
    ),
    "rows.catchup_live": "Rows of these passes whose output anybody reads: one an active request and pass.",
    "rows.prefill_hidden": "Prompt rows for which the target handed features to the drafter.",
    "rows.prefill_logits": "Prompt rows for which the target computed logits.",
    "rows.prefill_shared": (
        "Prompt rows that entered the target's layers that only read KV (Gemma 4 E2B and E4B); 0 where there are none."
    ),
    "experts_read": _first_paragraph(experts_read),
    "expert_bytes_read": _first_paragraph(expert_bytes_read),
    "graph": (
        "Captures and replays since the engine was made, warm-up included. On a GPU each graph of a round is captured "
        "twice, and the two are replayed in turn."
    ),
    "graph.rounds_per_replay": "Rounds that one graph holds, where it holds whole ones; else 1.",
    "graph.no_loop": "True where the drafter has no draft loop, so that no mode captures one: drafts are looked up.",
    "graph.nodes": "Kernels, copies and fills of each segment's graph, on a CPU operators; of the last one captured.",
    "launches_per_round": (
        "Device work the host submits in a round: kernels, copies, fills and graph launches of the profiled rounds; on "
        "a CPU operators called from Python that compute or write, and replays."
    ),
    "replays_per_round": "Graph replays a round, in the same rounds.",
    "host_syncs_per_round": (
        "Calls in which the host waits for the GPU (stream, event, device, blocking copy), in the same rounds; on a "
        "CPU reads of a tensor's value, where it would wait."
    ),
    "gpu_busy_ms_per_round": "Time in which the GPU runs at least one kernel, copy or fill, in the same rounds.",
    "gpu_idle_share": _first_paragraph(gpu_idle_share),
    "kernels": "Calls and device time of each kernel a round, profiled outside the timed part.",
    "accuracy": _first_paragraph(accuracy),
    "accuracy.cut": _first_paragraph(answers_cut),
    "accuracy_change": _first_paragraph(accuracy_change),
    "distance": _first_paragraph(distance),
    "parts": _first_paragraph(parts),
    "relaxed": _first_paragraph(relaxed_hits),
    "relaxed.per_1000_tokens": "Of the tokens emitted in rounds.",
    "thinking": _first_paragraph(thinking),
    "equal_to_plain": _first_paragraph(equal_share),
    "divergence": "Requests compared with plain decoding token by token, and how many differ.",
    "divergence.near_ties": (
        "First different at a token whose logit lies as near to plain decoding's best as rounding in the run's dtype "
        "reaches: 1e-4 in float32; in 16-bit types two steps of that logit, or six times what the number of rows "
        "moves the target's margins by, up to 16 steps."
    ),
    "divergence.bugs": "First different where they are not, under a rule that must be lossless.",
    "divergence.lossy": "Differ under a rule that may.",
    "divergence.median_index": "Median index of the first token that differs, over the requests that do.",
    "divergence.median_margin": "Median of plain decoding's own top-2 logit difference there.",
    "row_invariant": (
        "Whether a row of the target's forwards of up to 16 rows is the same, bit for bit, whatever rows stand beside "
        "it: attention and products of Triton in 16 bits, or of kernels=native (then up to 128, of requests with as "
        "many rows each, whatever row_invariant says), for layers of plain attention and MLPs. With Triton the rows "
        "of prompts then are the same in every forward too."
    ),
    "seconds": "Wall time: in a repeat the timed pass, at the top the whole run.",
    "num_threads": "Threads that computed on the CPU.",
    "weight_dtype": (
        "What the weights of the products of the target's layers are kept in: `dtype`, or fp8, e4m3 with a float32 "
        "scale for each block of 128 x 128; a CPU keeps those in `dtype`, rounded to what e4m3 has. bfloat16 holds "
        "for all of the target's matrices."
    ),
    "stored_types": (
        "Types that the file's weights have, the one with the most numbers first, where it is GGUF; `dtype` is what "
        "they are widened or rounded to."
    ),
    "target_digest": "Twelve digits of the target's configuration and weights; none where weights are random.",
    "template": "Twelve digits of the chat template that wrote the prompts (SHA-256); none where there is no template.",
    "thinking_markers": "Whether the target's tokenizer has the tokens that thinking stands between.",
    "memory": (
        "Bytes of the process in memory (RSS) when nothing of the run was loaded, and at most; on a GPU also what "
        "torch had allocated there at most."
    ),
    "world_size": "Processes that the target was split over; null where nothing was loaded.",
    "schema_version": "Version of this record's layout.",
}
"""The definition of each number in `summary.json`, by its key; a longer key is more specific."""
