"""`python -m spec_lab.gallery`: runs notebooks, and exports their pictures and conclusions to docs/gallery or --out.

It is called in the repository's folder, and shows the runs below --runs. If a run is missing, the error says how to
make it.

  python -m spec_lab.gallery
  python -m spec_lab.gallery notebooks/pruning.ipynb --runs outputs/pruning-sweep-1a2b3c4d --out /tmp/gallery
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from spec_lab.core.ending import ended, leave
from spec_lab.core.errors import UserError, describe_os_error
from spec_lab.gallery.export import execute, has_pictures, read_notebook, write_gallery

NOTEBOOKS, OUTPUTS, GALLERY = Path("notebooks"), Path("outputs"), Path("docs/gallery")


def main(arguments: Sequence[str] | None = None) -> int:
    """Export the gallery, and return the exit code: 2 if a notebook has no runs to show."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return ended(lambda: _export(_parse(arguments)))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m spec_lab.gallery", description=__doc__, formatter_class=layout)
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK", help="default: all in notebooks/")
    parser.add_argument("--runs", type=Path, default=OUTPUTS, metavar="DIR", help="where the runs are (outputs)")
    parser.add_argument("--out", type=Path, default=GALLERY, metavar="DIR", help="where to write (docs/gallery)")
    parser.add_argument("--note", default="", metavar="TEXT", help="a sentence about the runs, for the page")
    return parser.parse_args(arguments)


def _export(options: argparse.Namespace) -> int:
    paths = options.notebooks or sorted(NOTEBOOKS.glob("*.ipynb"))
    if not paths:
        raise UserError(f"{NOTEBOOKS}: it has no notebook; call this in the repository's folder, or name one")
    with_pictures = [path for path in paths if has_pictures(read_notebook(path))]
    if not with_pictures:
        raise UserError(
            f"{paths[0]}: none of its cells has a name, so there is no picture to export; name another notebook, such "
            "as notebooks/pruning.ipynb"
        )
    shown = []
    for path in with_pictures:
        print(f"running {path}", file=sys.stderr)
        shown.append(execute(path, {"runs_folder": str(options.runs.resolve())}))
    try:
        files = write_gallery(options.out, shown, "python -m spec_lab.gallery", options.note)
    except OSError as error:
        raise UserError(f"--out={options.out} cannot be written ({describe_os_error(error)})") from error
    print("\n".join(map(str, files)))
    return 0


if __name__ == "__main__":
    leave(main)
