"""`python -m spec_lab.lm_eval`: EleutherAI's harness runs a task of a local file on the lab's engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spec_lab.config.run import SamplingConfig
from spec_lab.core.errors import UserError
from spec_lab.lm_eval.__main__ import main
from spec_lab.lm_eval.reading import cut_at, overrides_of, require_sampling

TASK = """\
task: lists_here
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["Answer: 4"], max_gen_toks: 128, do_sample: false}}
filter_list:
  - {{name: last, filter: [{{function: regex, regex_pattern: "Answer: (\\\\d+)"}}, {{function: take_first}}]}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
PROMPTS = Path(__file__).parents[1] / "spec_lab" / "workloads" / "prompts" / "lists.jsonl"


def test_model_args_are_overrides() -> None:
    arguments = {"target": "pocket", "drafter.num_draft_tokens": 5, "row_invariant": False, "seed": None}
    assert overrides_of(arguments)[2:] == [
        "target=pocket",
        "drafter.num_draft_tokens=5",
        "row_invariant=false",
        "seed=null",
    ]
    assert overrides_of({"tree.paths": "[[0];[1]]"})[2:] == ["tree.paths=[[0],[1]]"]


def test_an_answer_is_cut_at_the_first_stop() -> None:
    assert cut_at("one two three", ["three", "two", ""]) == "one "
    assert cut_at("one", ["x"]) == "one"


def test_the_harness_scores_a_task_of_a_local_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("lm_eval", reason="needs the extra `eval`: pip install -c constraints.txt -e '.[eval]'")
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()[:3]]
    file = tmp_path / "lists.jsonl"
    file.write_text("\n".join(json.dumps({"question": row["prompt"], "answer": row["answer"]}) for row in rows))
    (tmp_path / "lists_here.yaml").write_text(TASK.format(file=file))
    run = ["--tasks", "lists_here", "--include_path", str(tmp_path), "--apply_chat_template", "--batch_size", "3"]
    target = "target=pocket,drafter=eagle3,num_threads=1"
    output = ["--output_path", str(tmp_path / "out"), "--log_samples"]
    assert main(["--model_args", target, *run, *output]) == 0
    assert "3 answers" in capsys.readouterr().err
    [result] = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(result.read_text())["results"]["lists_here"]["exact_match,last"] > 0.5
    [samples] = (tmp_path / "out").rglob("samples_*.jsonl")
    assert all("Answer: 4" not in json.loads(line)["resps"][0][0] for line in samples.read_text().splitlines())


@pytest.mark.parametrize(
    ("wanted", "temperature", "knob"),
    [
        ({"temperature": 0.5}, 0.0, "sampling.temperature=0.5"),
        ({"do_sample": False, "temperature": 0.5}, 0.5, "sampling.temperature=0"),
        ({"do_sample": True, "temperature": 0.5, "top_p": 0.9}, 0.5, "sampling.top_p=0.9"),
    ],
)
def test_other_sampling_than_the_tasks_is_refused(wanted: dict[str, Any], temperature: float, knob: str) -> None:
    with pytest.raises(UserError, match=knob):
        require_sampling(wanted, SamplingConfig(temperature=temperature))


def test_a_greedy_task_is_taken_whatever_its_temperature() -> None:
    require_sampling({"do_sample": False, "temperature": 1.0, "until": []}, SamplingConfig())
    require_sampling({"do_sample": True, "temperature": 0.5, "top_p": 1.0, "top_k": 0}, SamplingConfig(temperature=0.5))
