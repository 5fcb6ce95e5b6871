"""The schemas of `target=` of a training."""

from __future__ import annotations

from dataclasses import dataclass

from spec_lab.menu.config import knob


@dataclass
class TargetChoice:
    """The keys of a target, which the lab's own engine runs."""

    path: str | None = knob(None, "folder of a Hugging Face checkpoint, or a GGUF file")


@dataclass
class PocketTarget(TargetChoice):
    """target=pocket: the shipped one, or `target.path`."""


@dataclass
class HfTarget(TargetChoice):
    """target=hf: a checkpoint of a family in docs/families.md."""


@dataclass
class SmolLm2Target(TargetChoice):
    """target=smollm2_135m: SmolLM2-135M-Instruct, from its package or from `target.path`."""
