"""The shipped weights: their list, the folders of drafters' weights, and refusals if weights are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.gguf_file import is_gguf_misnamed
from spec_lab.core.errors import UserError
from spec_lab.menu.config import DrafterConfig, RunConfig, TargetConfig, TrainedDrafterConfig

ZOO = Path(__file__).parents[1] / "zoo"
SHIPPED: Mapping[str, tuple[str, ...]] = {
    "pocket": (
        *("eagle3", "mtp_eagle", "mtp_vanilla", "frozen_kv", "draft_model", "p_eagle"),
        *("dflash", "dspark", "dflash2", "domino", "lilicorr"),
    ),
    "pocket_hybrid": ("mtp_eagle",),
    "pocket_gemma": ("frozen_kv",),
    "pocket_moe": ("mtp_eagle",),
}
"""The targets whose weights are in this package, and the drafters that have weights for each."""
SHIPPED_HEADS: Mapping[str, tuple[str, ...]] = {"smollm2_135m": ("eagle3", "mtp_eagle", "dflash")}
"""The drafters with weights in this package for targets whose own weights are not in it."""


@dataclass(frozen=True, slots=True)
class DrafterWeights:
    """The weights of one drafter: those in `drafter.path`, or those shipped for the target.

    Attributes:
        shipped: the folders of shipped weights, by the target's option.
    """

    shipped: Mapping[str, Path]

    def shipped_for(self, target: TargetConfig) -> Path | None:
        return self.shipped.get(target.name)

    def folder(self, config: RunConfig, options: TrainedDrafterConfig) -> Path:
        """Return the folder of the weights.

        Raises:
            UserError: there is no path, and nothing is shipped for the target.
        """
        if options.path is not None:
            return Path(options.path)
        shipped = self.shipped_for(config.target)
        if shipped is None:
            raise UserError(no_weights_shipped(options, config.target))
        return shipped

    def missing(self, config: RunConfig) -> str | None:
        """Return the refusal if the run's drafter has no weights, else None."""
        options: Any = config.drafter
        if options.path is not None:
            return missing_folder("drafter.path", options.path)
        shipped = self.shipped_for(config.target)
        return no_weights_shipped(options, config.target) if shipped is None else missing_shipped(options, shipped)


def zoo_folders(name: str) -> dict[str, Path]:
    """Return the folders of the weights of drafter `name` in this package, by target."""
    shipped = {**SHIPPED, **SHIPPED_HEADS}
    return {target: ZOO / f"{target}-{name}" for target, drafters in shipped.items() if name in drafters}


def no_weights_shipped(options: DrafterConfig, target: TargetConfig, searched: str = "") -> str:
    """Return the refusal of a drafter without a path; `searched` says where else its weights were looked for."""
    return (
        f"no weights of drafter={options.name} are shipped for target={target.name}{searched}; "
        "give some with drafter.path=FOLDER or choose drafter=ngram"
    )


def missing_shipped(options: DrafterConfig, folder: Path) -> str | None:
    """Return the refusal if a drafter's shipped weights are missing from this checkout or package, else None."""
    if folder.is_dir():
        return None
    return f"drafter={options.name}: its weights are missing ({folder}); give some with drafter.path=FOLDER"


def path_beside_random_weights(options: TrainedDrafterConfig) -> str | None:
    """Return the refusal if a path is set together with random weights, which would not read it, else None."""
    if options.path is None:
        return None
    return f"drafter.path={options.path} is not read with drafter.weights=random; leave one of them out"


def missing_folder(knob: str, path: str) -> str | None:
    """Return the refusal if a path is not a folder, else None."""
    if Path(path).is_dir():
        return None
    if knob == "target.path" and is_gguf_misnamed(Path(path)):
        return f"{knob}={path} is a GGUF file, but has another suffix; give it a name that ends in .gguf"
    return f"{knob}={path} is not a folder; give the folder of a checkpoint"
