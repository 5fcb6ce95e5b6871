"""The runs whose bits `bits.py` records, each a line of overrides: few prompts and tokens, many combinations of
options.

Each option is combined with most others, not with all. A line may replace overrides that its whole list shares.
"""

from __future__ import annotations

BASE = "references=[] repeats=1 warmup_requests=0"
CPU = f"{BASE} device=cpu num_threads=1 profile_rounds=0 max_new_tokens=12 batch_size=2"
POCKET = f"{CPU} workload.limit=3"
IDS = "workload=random_ids workload.num_requests"
SAMPLED = "sampling=sampled acceptance=rejection"
DRAWN = f"{SAMPLED} drafter.draft_sampling=distribution"
NOTED = "record.confidences=true"

TORCH = """
drafter=none graph=eager
drafter=none graph=round sampling=sampled acceptance=rejection acceptance.method=one_hot
drafter=random graph=eager
drafter=ngram graph=eager prune=prefill
drafter=oracle graph=eager
drafter=eagle3 graph=eager prune=none
drafter=eagle3 graph=eager prune=prefill drafter.window=9
drafter=eagle3 graph=eager prune=post_attention
drafter=eagle3 graph=eager prune=catchup drafter.num_draft_tokens=1
drafter=eagle3 graph=round prune=catchup
drafter=eagle3 graph=split_seed prune=prefill
drafter=eagle3 graph=full_loop prune=post_attention
drafter=eagle3 graph=full_loop prune=catchup graph.verify=false
drafter=eagle3 graph=step_replay prune=none
drafter=eagle3 graph=round prune=none graph.metadata=stale drafter.window=9
drafter=eagle3 graph=round prune=catchup graph.prompts=true cache.prefill_tokens=1
drafter=eagle3 graph=round prune=catchup graph.rounds_per_replay=3
drafter=eagle3 graph=round_overlap prune=post_attention
drafter=eagle3 graph=round_overlap prune=none graph.rounds_per_replay=2
drafter=mtp_eagle graph=eager prune=catchup
drafter=mtp_eagle graph=step_replay prune=post_attention
drafter=mtp_eagle graph=full_loop prune=none drafter.recycled_hidden=pre_norm
drafter=mtp_vanilla graph=eager prune=post_attention
drafter=mtp_vanilla graph=round prune=catchup
drafter=mtp_vanilla graph=step_replay prune=none
drafter=frozen_kv graph=eager prune=prefill
drafter=frozen_kv graph=split_seed prune=none drafter.position=bonus
drafter=draft_model graph=eager prune=none
drafter=draft_model graph=round prune=catchup cache.prefill_chunk=16
drafter=draft_model graph=step_replay prune=post_attention
drafter=eagle3 graph=eager prune=catchup {DRAWN}
drafter=eagle3 graph=round prune=catchup {DRAWN} acceptance.method=block
drafter=eagle3 graph=eager prune=none {DRAWN} sampling.top_k=40
drafter=mtp_eagle graph=round prune=post_attention {SAMPLED} acceptance.method=one_hot sampling.top_p=0.9
drafter=mtp_vanilla graph=full_loop prune=catchup {DRAWN}
drafter=frozen_kv graph=step_replay prune=none {DRAWN}
drafter=draft_model graph=full_loop prune=catchup {DRAWN} acceptance.method=block sampling.temperature=0.7
drafter=ngram graph=eager prune=none {SAMPLED} acceptance.method=one_hot
drafter=eagle3 graph=eager prune=catchup acceptance=relaxed_thinking
drafter=mtp_eagle graph=round prune=catchup acceptance=relaxed_thinking acceptance.form=ratio acceptance.phase=round
drafter=eagle3 graph=round prune=catchup acceptance=synthetic acceptance.mean_length=2.5
drafter=eagle3 graph=eager prune=catchup {NOTED}
drafter=mtp_eagle graph=round prune=none {NOTED}
drafter=mtp_vanilla graph=eager prune=catchup {NOTED}
drafter=draft_model graph=full_loop prune=post_attention {NOTED} {DRAWN}
drafter=frozen_kv graph=round prune=prefill
drafter=eagle3 graph=eager prune=none acceptance=relaxed_thinking
drafter=mtp_vanilla graph=full_loop prune=catchup
drafter=eagle3 graph=eager prune=catchup tree=dynamic
drafter=eagle3 graph=round prune=none tree=dynamic drafter.num_draft_tokens=4
drafter=eagle3 graph=full_loop prune=post_attention tree=static
drafter=eagle3 graph=eager prune=catchup tree=static {DRAWN} acceptance.method=traversal
drafter=mtp_eagle graph=round prune=catchup tree=dynamic acceptance=synthetic acceptance.mean_length=2
drafter=draft_model graph=round prune=catchup tree=dynamic tree.num_rows=9 {SAMPLED} acceptance.method=one_hot
drafter=frozen_kv graph=full_loop prune=none tree=dynamic acceptance=relaxed_thinking
drafter=ngram graph=eager prune=none tree=dynamic
target=pocket_gemma drafter=none graph=eager
target=pocket_gemma drafter=frozen_kv graph=eager prune=prefill
target=pocket_gemma drafter=frozen_kv graph=round prune=none {DRAWN}
target=pocket_gemma drafter=frozen_kv graph=round prune=prefill tree=dynamic
target=pocket_hybrid drafter=ngram graph=eager
target=pocket_hybrid drafter=mtp_eagle graph=eager prune=catchup
target=pocket_hybrid drafter=mtp_eagle graph=round prune=post_attention recurrent.rollback=replay
target=pocket_hybrid drafter=mtp_eagle graph=full_loop prune=none {NOTED}
target=pocket_moe drafter=ngram graph=eager
target=pocket_moe drafter=mtp_eagle graph=eager prune=catchup
target=pocket_moe drafter=mtp_eagle graph=round prune=post_attention {DRAWN}
target=pocket_moe drafter=mtp_eagle graph=round prune=none tree=dynamic
drafter=eagle3 graph=eager prune=catchup {IDS}=17 batch_size=17 max_new_tokens=5
drafter=eagle3 graph=eager prune=post_attention {IDS}=6 batch_size=6 max_new_tokens=5
"""

NATIVE = """
drafter=ngram graph=eager
drafter=eagle3 graph=round prune=prefill graph.rounds_per_replay=2
drafter=eagle3 graph=full_loop prune=catchup
drafter=eagle3 graph=step_replay prune=catchup {DRAWN}
drafter=eagle3 graph=eager prune=none drafter.window=9 acceptance=synthetic acceptance.mean_length=2.5
drafter=mtp_eagle graph=round prune=catchup
drafter=mtp_vanilla graph=eager prune=catchup
drafter=frozen_kv graph=split_seed prune=prefill
drafter=draft_model graph=round prune=post_attention
drafter=eagle3 graph=eager prune=catchup {IDS}=4 batch_size=4 max_new_tokens=5
drafter=eagle3 graph=eager prune=post_attention {IDS}=17 batch_size=17 max_new_tokens=5
drafter=eagle3 graph=eager prune=none {IDS}=33 batch_size=33 max_new_tokens=4
"""

TINY = f"{IDS}=1 workload.prompt_tokens=3 max_new_tokens=4 batch_size=1"
TWO = "drafter.num_draft_tokens=2"
SHORT = "max_new_tokens=2 workload.prompt_tokens=2"
TREE = "tree=dynamic drafter.num_draft_tokens=2 tree.topk=2 tree.num_rows=4"
INTERPRETED = """
attention=triton drafter=eagle3 graph=eager {TWO} prune=catchup
attention=torch drafter=eagle3 graph=round {TWO} prune=post_attention {DRAWN}
attention=torch drafter=eagle3 graph=eager {TWO} prune=none {NOTED} acceptance=relaxed_thinking
attention=triton drafter=eagle3 graph=eager prune=catchup {TREE}
attention=torch drafter=mtp_vanilla graph=eager {TWO} prune=catchup acceptance=synthetic acceptance.mean_length=2
attention=torch drafter=draft_model graph=eager {TWO} prune=catchup
attention=triton target=pocket_gemma drafter=frozen_kv graph=eager {TWO} prune=prefill
attention=triton target=pocket_moe drafter=mtp_eagle graph=eager {TWO} prune=catchup {SHORT}
attention=triton target=pocket_hybrid drafter=mtp_eagle graph=eager {TWO} prune=catchup {SHORT}
"""


LONG = "workload.ignore_eos=true max_new_tokens=24 profile_rounds=2"
CUDA = f"{BASE} {LONG} device=cuda dtype=bfloat16 kernels=triton attention=triton"
FEW = "workload.limit=3 batch_size=2"
POCKETS = """
drafter=none graph=round batch_size=1 workload.limit=1
drafter=eagle3 graph=eager prune=catchup {FEW}
drafter=mtp_eagle graph=eager prune=post_attention {FEW}
drafter=draft_model graph=eager prune=catchup {FEW} {DRAWN}
drafter=eagle3 graph=round prune=none batch_size=1 workload.limit=1
drafter=eagle3 graph=round prune=prefill batch_size=1 workload.limit=1
drafter=eagle3 graph=round prune=post_attention batch_size=1 workload.limit=1
drafter=eagle3 graph=round prune=catchup batch_size=1 workload.limit=1
drafter=eagle3 graph=round prune=catchup batch_size=4 workload.limit=4
drafter=none graph=round batch_size=17 {IDS}=17
drafter=eagle3 graph=round prune=none batch_size=6 workload.limit=6
drafter=eagle3 graph=round prune=post_attention batch_size=6 workload.limit=6
drafter=eagle3 graph=round prune=catchup batch_size=6 workload.limit=6
drafter=eagle3 graph=round prune=catchup batch_size=16 {IDS}=16
drafter=eagle3 graph=round prune=post_attention batch_size=13 {IDS}=13 drafter.num_draft_tokens=4
drafter=eagle3 graph=round prune=catchup batch_size=13 {IDS}=13 drafter.num_draft_tokens=4
drafter=eagle3 graph=round prune=post_attention batch_size=43 {IDS}=43 drafter.num_draft_tokens=2
drafter=eagle3 graph=round prune=none batch_size=43 {IDS}=43 drafter.num_draft_tokens=2
drafter=mtp_eagle graph=split_seed prune=catchup {FEW}
drafter=mtp_vanilla graph=step_replay prune=catchup {FEW}
drafter=frozen_kv graph=full_loop prune=prefill {FEW}
drafter=draft_model graph=round prune=catchup {FEW}
drafter=eagle3 graph=round prune=catchup {FEW} max_new_tokens=48 graph.rounds_per_replay=3
drafter=eagle3 graph=round prune=catchup batch_size=1 workload.limit=2 graph.prompts=true
drafter=eagle3 graph=round prune=catchup {FEW} {DRAWN}
drafter=mtp_eagle graph=round prune=catchup {FEW} acceptance=relaxed_thinking
drafter=eagle3 graph=round prune=catchup {FEW} {NOTED}
drafter=eagle3 graph=round prune=catchup {FEW} tree=dynamic
drafter=mtp_eagle graph=round prune=none {FEW} tree=static {DRAWN} acceptance.method=traversal
drafter=eagle3 graph=round prune=catchup {FEW} row_invariant=false
drafter=eagle3 graph=round prune=catchup {FEW} dtype=float32
drafter=eagle3 graph=round prune=catchup {FEW} kernels=torch
target=pocket_gemma drafter=frozen_kv graph=round prune=prefill {FEW}
target=pocket_hybrid drafter=mtp_eagle graph=round prune=catchup {FEW}
target=pocket_hybrid drafter=mtp_eagle graph=round prune=post_attention {FEW} recurrent.rollback=replay
target=pocket_moe drafter=mtp_eagle graph=round prune=catchup {FEW}
target=pocket_moe drafter=mtp_eagle graph=round prune=none batch_size=6 workload.limit=6
"""

RANDOM = "target.weights=random drafter.weights=random workload.prompt_tokens=64 graph=round prune=catchup"
LARGE = """
target=llama3_8b drafter=eagle3 drafter.draft_vocab_size=32000 {IDS}=1 batch_size=1
target=llama3_8b drafter=eagle3 drafter.draft_vocab_size=32000 {IDS}=8 batch_size=8
target=llama3_8b target.weight_dtype=fp8 drafter=eagle3 drafter.draft_vocab_size=32000 {IDS}=1 batch_size=1
target=qwen3_5_9b drafter=mtp_eagle {IDS}=1 batch_size=1
target=gemma4_e4b drafter=frozen_kv {IDS}=1 batch_size=1
target=glm4_7_flash drafter=mtp_eagle {IDS}=1 batch_size=1
target=qwen3_30b_a3b drafter=eagle3 drafter.draft_vocab_size=32000 {IDS}=4 batch_size=4
"""


def lines_of(base: str, text: str) -> list[str]:
    """Return the lines of `text`, each after `base`, with this file's constants in place of `{NAME}`. The last value of
    a key replaces earlier ones."""
    names = {name: value for name, value in globals().items() if isinstance(value, str)}
    lines = [f"{base} {line}".format_map(names).split() for line in text.strip().splitlines()]
    return [" ".join({word.partition("=")[0]: word for word in words}.values()) for words in lines]


ON_CPU = (
    *lines_of(f"{POCKET} attention=torch kernels=torch", TORCH),
    *lines_of(f"{POCKET} attention=torch kernels=native", NATIVE),
    *lines_of(f"{CPU} {TINY} kernels=triton", INTERPRETED),
)
ON_GPU = (*lines_of(CUDA, POCKETS), *lines_of(f"{CUDA} {RANDOM}", LARGE))
