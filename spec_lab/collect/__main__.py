"""`python -m spec_lab.collect`: writes safetensors files with the hidden states on which a drafter is trained.

python -m spec_lab.collect target=hf target.path=DIR texts=FOLDER output_dir=DIR
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from spec_lab.core.ending import ended, leave
from spec_lab.core.errors import UserError
from spec_lab.menu.bounds import out_of_bounds
from spec_lab.train.collect_config import CollectConfig

INTRODUCTION = """\
spec_lab.collect: writes a target's hidden states over texts, for a drafter that is trained elsewhere.

  python -m spec_lab.collect target=hf target.path=DIR texts=FOLDER output_dir=DIR
  python -m spec_lab.collect target=smollm2_135m texts=FOLDER output_dir=DIR layers=[1,14,26]

It first prints how many bytes each token takes. The same command continues after an interruption.

"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments` (default: those of the process), and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return ended(lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        fields = dataclasses.fields(CollectConfig)
        print(INTRODUCTION + "".join(f"  {field.name}: {field.metadata['help']}\n" for field in fields), end="")
        return 0
    config, path = parse(arguments)
    from spec_lab.train.collecting import collect

    print(collect(path, config))
    return 0


def parse(arguments: Sequence[str]) -> tuple[CollectConfig, Path]:
    """Return the settings and the checkpoint.

    Raises:
        UserError: a word is unknown, a value has another type or is out of bounds, or a file or folder is missing.
    """
    of_target = [word for word in arguments if word.startswith(("target=", "target.path="))]
    words = [word for word in arguments if word not in of_target]
    config: Any = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(CollectConfig), OmegaConf.from_dotlist(words))
    )
    for problem in out_of_bounds(config):
        raise UserError(problem)
    for name in ("texts", "output_dir"):
        if not getattr(config, name):
            raise UserError(f"{name} has no value; set {name}=FOLDER")
    target = dict(word.split("=", 1) for word in of_target)
    return config, _checkpoint(target.get("target", "hf"), target.get("target.path"))


def _checkpoint(target: str, at: str | None) -> Path:
    """Return the path of the target's checkpoint.

    Raises:
        UserError: it does not exist, or the target is not one of the two supported here.
    """
    from spec_lab.train.frozen_paths import checkpoint_path, needs_a_path, package_is_here, packaged_path
    from spec_lab.train.target_config import HfTarget, SmolLm2Target

    if target == "smollm2_135m":
        shipped = SmolLm2Target(path=at)
        if (refusal := package_is_here(shipped)) is None:
            return packaged_path(shipped)
    elif target == "hf":
        lying = HfTarget(path=at)
        if (refusal := needs_a_path(lying)) is None:
            return checkpoint_path(lying)
    else:
        refusal = (
            f"target={target} is not supported by spec_lab.collect; use target=hf "
            "target.path=DIR, or target=smollm2_135m"
        )
    raise UserError(refusal)


if __name__ == "__main__":
    leave(main)
