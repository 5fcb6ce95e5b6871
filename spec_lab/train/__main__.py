"""Trains a head: `python -m spec_lab.train target=hf target.path=DIR drafter=eagle3 'data=outputs/texts-*'`.

It is a plain Hydra program: `--help` prints the defaults, `--cfg job` what a command composes, and `hydra.run.dir` is
the folder of the head.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from spec_lab.core.errors import Breakdown, UserError
from spec_lab.train.config import Target, TrainConfig
from spec_lab.train.heads import HEADS

TARGETS = ("hf", "pocket", "pocket_gemma", "smollm2_135m")
"""The targets of a run whose weights can be here and that heads are trained for."""
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
    store = ConfigStore.instance()
    store.store(group="schema", name="train", node=TrainConfig, package="_global_")
    store.store(name="train", node=SETTINGS)
    for name in TARGETS:
        store.store(group="target", name=name, node=Target(name=name))
    for name, kind in HEADS.items():
        store.store(group="drafter", name=name, node=kind)


@hydra.main(config_path=None, config_name="train", version_base="1.3")
def main(composed: DictConfig) -> None:
    """Train one head."""
    from spec_lab.train.job import train_head

    config = OmegaConf.to_object(composed)
    assert isinstance(config, TrainConfig)
    folder, stored = Path(HydraConfig.get().runtime.output_dir), ConfigStore.instance().repo
    # Runs that the trainer composes have options of these names too.
    own = {group: stored.pop(group) for group in ("target", "drafter")}
    try:
        print(train_head(config, folder))
    except (UserError, Breakdown) as error:
        print(f"{'refused' if isinstance(error, UserError) else 'failed'}: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UserError) else 1) from None
    finally:
        stored.update(own)


if __name__ == "__main__":
    store()
    if "--plan" in sys.argv:
        sys.argv[sys.argv.index("--plan")] = "plan=true"
    main()
