"""The schema of `spec_lab.collect`, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from spec_lab.config.option import knob


@dataclass
class CollectConfig:
    """The keys of a collection."""

    texts: str = knob("", "folder that python -m spec_lab.train.texts wrote")
    output_dir: str = knob("", "folder of the files")
    layers: list[int] = knob(
        [],
        "layers whose outputs are written besides the last state, numbered from 0, with -1 for the embedding; [] takes "
        "those that EAGLE-3 reads",
        least=-1,
    )
    num_texts: int | None = knob(None, "number of texts, from the first on; null is all", least=1)
    tokens_per_file: int = knob(2**18, "tokens in a file; a kill loses at most one file", least=1, most=2**24)
    tokens_per_forward: int = knob(4096, "tokens in a forward of the target", least=16, most=2**17)
    device: str = knob("auto", "auto, cpu, cuda or cuda:N")
