"""scripts/passage_prompts.py: prompts about passages of given texts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "passage_prompts.py"
MOST_WORDS_OF_A_TASK = 20


def prompts(folder: Path, seed: int) -> list[str]:
    text, out = folder / "text.txt", folder / f"{seed}.jsonl"
    text.write_text("\n".join(f"Sentence {number} of Everyman tells of nothing." for number in range(300)))
    subprocess.run([sys.executable, SCRIPT, out, text, "--seed", str(seed)], check=True, capture_output=True)
    return [json.loads(line)["prompt"] for line in out.read_text().splitlines()]


def test_a_passage_has_two_tasks_and_no_prompt_comes_twice(tmp_path: Path) -> None:
    found = prompts(tmp_path, 0)
    assert len(found) >= 8 and len(set(found)) == len(found)
    assert all(80 <= len(prompt.split()) <= 320 + MOST_WORDS_OF_A_TASK for prompt in found)
    first = [prompt for prompt in found if "Sentence 0 " in prompt]
    assert len(first) == 2
    assert found == prompts(tmp_path, 0) and found != prompts(tmp_path, 1)
