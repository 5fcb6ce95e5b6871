"""Trains a head: `python -m spec_lab.train target=hf target.path=DIR drafter=eagle3 'data=outputs/texts-*'`.

It is a plain Hydra program: `--help` prints the defaults, `--cfg job` what a command composes, and `hydra.run.dir` is
the folder of the head.
"""

from __future__ import annotations

import sys
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from spec_lab.train.config import TrainConfig
from spec_lab.train.heads import HEADS
from spec_lab.train.job import train_head
from spec_lab.train.program import ended, store_targets

SETTINGS: dict[str, Any] = {
    "defaults": ["/schema/train", {"target": "pocket"}, {"drafter": "eagle3"}, "_self_"],
    "hydra": {
        "job": {"name": "spec_lab.train"},
        "run": {"dir": "outputs/train/${target.name}-${drafter.name}"},
        "sweep": {"dir": "outputs/train", "subdir": "${target.name}-${drafter.name}-${hydra.job.num}"},
    },
}


def store() -> None:
    """Make the options of a training known to Hydra."""
    stored = ConfigStore.instance()
    stored.store(group="schema", name="train", node=TrainConfig, package="_global_")
    stored.store(name="train", node=SETTINGS)
    store_targets()
    for name, kind in HEADS.items():
        stored.store(group="drafter", name=name, node=kind)


@hydra.main(config_path=None, config_name="train", version_base="1.3")
def main(composed: DictConfig) -> None:
    """Train one head."""
    config: Any = OmegaConf.to_object(composed)
    ended(lambda folder: train_head(config, folder))


if __name__ == "__main__":
    store()
    if "--plan" in sys.argv:
        sys.argv[sys.argv.index("--plan")] = "plan=true"
    main()
