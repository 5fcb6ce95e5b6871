"""`python -m spec_lab.train`: trains the pocket target and a drafter for it."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from spec_lab.cli.options import conf_folder


def config_folder() -> str:
    """`conf/train`, in the form Hydra takes."""
    return str(conf_folder().absolute() / "train")


@hydra.main(version_base="1.3", config_path=config_folder(), config_name="config")
def main(config: DictConfig) -> None:
    """Builds the pipeline that the configuration describes, and runs it."""
    hydra.utils.instantiate(config, _convert_="all").run()


if __name__ == "__main__":
    main()
