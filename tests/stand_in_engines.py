"""Stand-ins for engines that need a GPU: packages with the names and types that the workers use, which decode by rote.

Each drafts K tokens a round, of which it accepts 0, 1, ..., K, 0, ... in turn. The tokens of a request are those that
the environment variable `STAND_IN_TEXTS` names by prompt. They show what the lab asks for and how it counts, not that
the engines run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

TEXTS = "STAND_IN_TEXTS"
COMMON = """
import json, os

__version__ = "9.9"

def text_of(prompt):
    return json.load(open(os.environ["STAND_IN_TEXTS"]))[",".join(map(str, prompt))]

def rounds_of(ids, k):
    given, accepted = 1, []
    while k and given < len(ids):
        accepted.append(len(accepted) % (k + 1))
        given += accepted[-1] + 1
    return accepted

def note(what):
    with open(os.environ["STAND_IN_TEXTS"] + ".asked", "a") as file:
        file.write(json.dumps(what) + chr(10))
"""
VLLM = """
from dataclasses import dataclass, field
from types import SimpleNamespace as Of
import time

@dataclass
class SamplingParams:
    temperature: float; max_tokens: int; ignore_eos: bool; detokenize: bool
    stop_token_ids: list | None = None; seed: int = 0; top_k: int = 0; top_p: float = 1.0

class LLM:
    def __init__(self, speculative_config=None, **arguments):
        note({"speculative_config": speculative_config, **arguments})
        self.k = (speculative_config or {}).get("num_speculative_tokens", 0)
        self.counts, self.by_position = [0, 0, 0], [0] * self.k
        assert arguments["disable_log_stats"] is False

    def generate(self, prompts, params, use_tqdm):
        assert len({one.seed for one in params}) == len(params)
        return [self.one(prompt["prompt_token_ids"], one) for prompt, one in zip(prompts, params, strict=True)]

    def one(self, prompt, params):
        ids = text_of(prompt)[: params.max_tokens]
        accepted = rounds_of(ids, self.k)
        for place, count in enumerate((len(accepted), self.k * len(accepted), sum(accepted))):
            self.counts[place] += count
        for place in range(self.k):
            self.by_position[place] += sum(count > place for count in accepted)
        metrics = Of(per_step_accepted=accepted, per_step_drafted=[self.k] * len(accepted), histogram=None)
        now = time.monotonic()
        stats = Of(scheduled_ts=now, first_token_ts=now + 0.25, last_token_ts=now + 1.0)
        reason = "length" if len(ids) == params.max_tokens else "stop"
        completion = Of(token_ids=ids, finish_reason=reason, spec_decode_metrics=metrics)
        return Of(outputs=[completion], metrics=stats)

    def get_metrics(self):
        found = [Of(name=f"vllm:spec_decode_{name}", value=value) for name, value in zip(NAMES, self.counts)]
        return [*found, Of(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=self.by_position)]
"""
NAMES = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
ARGUMENTS = """
from dataclasses import dataclass

@dataclass
class EngineArgs:
    model: str = ""
"""
SGLANG = """
class Engine:
    def __init__(self, **arguments):
        note(arguments)
        self.k = arguments.get("speculative_num_steps", 0)

    def generate(self, input_ids, sampling_params):
        return [self.one(prompt, params) for prompt, params in zip(input_ids, sampling_params, strict=True)]

    def one(self, prompt, params):
        ids = text_of(prompt)[: params["max_new_tokens"]]
        accepted = rounds_of(ids, self.k)
        reason = "length" if len(ids) == params["max_new_tokens"] else "stop"
        info = {"finish_reason": {"type": reason}}
        if accepted:
            info["spec_verify_ct"] = len(accepted)
            info["spec_accept_length"] = len(ids) / len(accepted)
            info[ACCEPTED] = sum(accepted)
            info[HISTOGRAM] = [accepted.count(number) for number in range(self.k + 1)]
        return {"output_ids": ids, "meta_info": info}
"""


def write_texts(path: Path, texts: Mapping[Sequence[int], Sequence[int]]) -> Path:
    """Write the tokens that stand-ins answer to each prompt."""
    path.write_text(json.dumps({",".join(map(str, prompt)): list(ids) for prompt, ids in texts.items()}))
    return path


def write_vllm(folder: Path, by_request: bool = True, names: Sequence[str] = NAMES) -> Path:
    """Write a package `vllm`, of a version that counts by request or one that does not; `names` are its counters."""
    package = folder / "vllm"
    (package / "engine").mkdir(parents=True)
    (package / "__init__.py").write_text(f"{COMMON}\nNAMES = {tuple(names)!r}\n{VLLM}")
    (package / "engine" / "__init__.py").touch()
    field = '    per_request_spec_decode_metrics: str = "off"\n' if by_request else ""
    (package / "engine" / "arg_utils.py").write_text(ARGUMENTS + field)
    return folder


def write_sglang(folder: Path, accepted: str, histogram: str) -> Path:
    """Write a package `sglang` of a version that counts under these names."""
    package = folder / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"{COMMON}\nACCEPTED, HISTOGRAM = {accepted!r}, {histogram!r}\n{SGLANG}")
    return folder


def asked_of(texts: Path) -> list[dict[str, object]]:
    """Return the arguments with which engines were made."""
    return [json.loads(line) for line in texts.with_name(f"{texts.name}.asked").read_text().splitlines()]
