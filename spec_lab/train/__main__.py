"""`python -m spec_lab.train`: trains the pocket target and a drafter for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import hydra
from omegaconf import DictConfig


def config_folder() -> str:
    """`conf/train`: of the installed package, or beside the package in a raw checkout."""
    installed = importlib.util.find_spec("spec_lab.conf")
    if installed is not None and installed.submodule_search_locations:
        return str(Path(installed.submodule_search_locations[0]) / "train")
    return str(Path(__file__).parents[2] / "conf" / "train")


@hydra.main(version_base="1.3", config_path=config_folder(), config_name="config")
def main(config: DictConfig) -> None:
    """Builds the pipeline that the configuration describes, and runs it."""
    hydra.utils.instantiate(config, _convert_="all").run()


if __name__ == "__main__":
    main()
