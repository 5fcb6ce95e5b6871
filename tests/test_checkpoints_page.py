"""The commands of docs/checkpoints.md as they stand there, on small checkpoints of the same file and tensor names."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spec_lab.__main__ import main as run
from spec_lab.checkpoints.checkpoint import stored_tensors
from spec_lab.checkpoints.families import read_model_config
from spec_lab.doctor.__main__ import main as examine
from spec_lab.record.reading import find_runs
from tests.tiny_checkpoints import make_tiny_eagle3, make_tiny_target
from tests.tiny_runs import write_prompts, write_tokenizer

PAGE = Path(__file__).parents[1] / "docs" / "checkpoints.md"
QUICK = ["max_new_tokens=4", "workload.limit=2", "repeats=1", "warmup_requests=0", "profile_rounds=0", "num_threads=1"]
TEMPLATE = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"


def commands(start: str) -> list[list[str]]:
    """The commands of the page that begin so, in words."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith(start)]
    return [shlex.split(line)[len(shlex.split(start)) :] for line in lines]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`llama` and `eagle3`, the head as a pickle of tensors, as both come from where the page says."""
    monkeypatch.chdir(tmp_path)
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    make_tiny_target(tmp_path / "llama", "llama", max_shard_size="20KB", rope_parameters=rope)
    write_tokenizer(tmp_path / "llama", ["<bos>"])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "chat_template": TEMPLATE}
    (tmp_path / "llama" / "tokenizer_config.json").write_text(json.dumps(settings))
    make_tiny_eagle3(tmp_path / "eagle3", read_model_config(tmp_path / "llama"))
    weights = tmp_path / "eagle3" / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "eagle3" / "pytorch_model.bin")
    weights.unlink()
    write_prompts(tmp_path / "question.jsonl", [{"question_id": 1, "category": "qa", "turns": ["ab", "cd"]}])
    return tmp_path


def test_the_page_can_be_followed(folders: Path) -> None:
    with pytest.raises(FileNotFoundError):
        stored_tensors(folders / "eagle3")
    [[convert]] = commands("python -c")
    exec(convert, {})
    assert {name.split(".")[0] for name in stored_tensors(folders / "eagle3")} == {
        "fc", "midlayer", "norm", "lm_head", "d2t", "t2d",
    }  # fmt: skip
    assert len(list((folders / "llama").glob("model-*-of-*.safetensors"))) > 1
    [doctor] = commands("python -m spec_lab.doctor")
    assert examine([*doctor, "max_new_tokens=8", "workload.limit=8", "num_threads=1"]) == 1, (
        "random weights are a fault"
    )
    of_folders = [
        command for command in commands("python -m spec_lab target=hf") if "target.path=FILE.gguf" not in command
    ]
    for number, command in enumerate(of_folders, start=1):
        arguments = ["target=hf", *(word for word in command if not word.endswith("=triton"))]
        assert run([*arguments, *QUICK, f"output_dir=outputs/{number}"]) == 0, command
    smoke, bench = (find_runs(Path("outputs") / number)[-1].run for number in "12")
    assert smoke["divergence.bugs"] == 0
    assert (bench["num_requests"], bench.choices["graph"]) == (2, "full_loop")
    [shapes] = commands("python -m spec_lab target=llama3_8b")
    assert run(["--cfg", "job", "target=llama3_8b", *shapes]) == 0
