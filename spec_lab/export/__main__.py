"""`python -m spec_lab.export MODEL to=FORM FOLDER [target=MODEL]`: a model or a head in the files of other engines.

MODEL is the folder or GGUF file of a checkpoint, or the name of shipped weights. Other heads than shipped ones need
their target, which for to=gguf is a GGUF file.

  MODEL            to=hf                    to=gguf                      to=speculators, deepspec
  GGUF target      a folder of safetensors  the file in float32          -
  EAGLE-3 head     LlamaForCausalLMEagle3   a head for llama.cpp         speculators
  block drafter    z-lab's layout           -                            both
  MTP module       -                        the qwen35 target with it    -

  python -m spec_lab.export smollm2_135m to=hf smollm2
  python -m spec_lab.export outputs/train/hf-eagle3 to=gguf head target=FILE.gguf
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from spec_lab.checkpoints.packaged import PACKAGED, ZOO
from spec_lab.core.ending import ended
from spec_lab.core.errors import UserError

FORMS = ("hf", "gguf", "speculators", "deepspec")
GGUF_FILE = "model.gguf"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what is asked for, print where, and return the exit code: 2 if it cannot be written."""
    return ended(lambda: print(_written(_parser().parse_args(arguments))))


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m spec_lab.export", description=__doc__, formatter_class=layout)
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, or the name of shipped weights")
    parser.add_argument("to", choices=[f"to={form}" for form in FORMS], help="the form to write")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to write; it is made")
    parser.add_argument("target", nargs="?", metavar="target=MODEL", help="the target of a head")
    return parser


def _written(options: argparse.Namespace) -> Path:
    from spec_lab.export.layouts import Kind, kind_of, write_layout

    source, form, folder = _path(options.model), options.to.removeprefix("to="), options.folder
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; choose another folder")
    kind = kind_of(source)
    if form == "gguf":
        return _gguf(source, kind, folder / GGUF_FILE, options)
    if kind != Kind.target:
        write_layout(form, source, folder, _target(options), _num_drafts(source))
        return folder
    from spec_lab.checkpoints.gguf_file import is_gguf
    from spec_lab.export.hf import write_hf

    if form != "hf" or not is_gguf(source):
        raise UserError(f"{source} holds a target, of which only a GGUF file is written anew, with to=hf or to=gguf")
    write_hf(source, folder)
    return folder


def _gguf(source: Path, kind: str, file: Path, options: argparse.Namespace) -> Path:
    from spec_lab.checkpoints.gguf_file import is_gguf
    from spec_lab.export.gguf_files import write_eagle3, write_target
    from spec_lab.export.gguf_mtp import write_mtp
    from spec_lab.export.layouts import Kind

    if kind == Kind.eagle3:
        write_eagle3(file, source, _target(options))
    elif is_gguf(source):
        write_target(file, source)
    elif kind == Kind.mtp or (kind == Kind.target and options.target):  # which may have modules
        write_mtp(file, source, _target(options))
    elif kind == Kind.target:
        raise UserError(f"{source} is a folder; llama.cpp's convert_hf_to_gguf.py makes a GGUF file of it")
    else:
        raise UserError(
            f"{source} holds a drafter of kind {kind}, which is not written for llama.cpp; use an EAGLE-3 head"
        )
    return file


def _path(name: str) -> Path:
    """Return the path of a checkpoint that is typed as a path, or by the name of shipped weights."""
    packaged = PACKAGED[name].find() if name in PACKAGED else None
    places = (Path(name), ZOO / name, packaged)
    found = next((place for place in places if place is not None and place.exists()), None)
    if found is None:
        remedy = PACKAGED[name].command if name in PACKAGED else "give a folder, a GGUF file, or a shipped name"
        raise UserError(f"{name} is no checkpoint; {remedy}")
    return found


def _target(options: argparse.Namespace) -> Path:
    """Return the target of a head; a shipped head is named TARGET-DRAFTER."""
    typed = (options.target or "").removeprefix("target=")
    if not typed and options.model not in {folder.name for folder in ZOO.iterdir()}:
        raise UserError(f"{options.model} holds a head; add target=MODEL")
    return _path(typed or options.model.partition("-")[0])


def _num_drafts(head: Path) -> int:
    """Return the number of drafts with which a head of the lab was measured; 3 for another."""
    record = head / "training.json"
    if not record.exists():
        return 3
    drafts: int = json.loads(record.read_text(encoding="utf-8"))["config"]["evaluation"]["num_draft_tokens"]
    return drafts


if __name__ == "__main__":
    raise SystemExit(main())
