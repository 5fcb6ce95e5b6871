"""Says which names a run and its output folder may have."""

from __future__ import annotations

MOST_BYTES = 100
"""The options and a hash follow in the folder's name, for which file systems have 255."""


def refuse_name(name: str) -> str | None:
    """Say what speaks against `name=...`, in a line; None where nothing does."""
    if not name or name != name.strip() or name.startswith((".", "-")) or "/" in name or not name.isprintable():
        return f"name={name!r} is part of a folder's name; use a plain word such as name=run"
    if len(name.encode()) > MOST_BYTES:
        return f"name={name[:20]}... has {len(name)} characters; use a shorter one, such as name=run"
    return None


def refuse_output_dir(output_dir: str) -> str | None:
    """Say what speaks against `output_dir=...` before anything is made, in a line; None where nothing does."""
    if output_dir.startswith(("~", "$")):
        return f"output_dir={output_dir!r} begins with what a shell leaves alone in quotes; write the path in full"
    if output_dir.strip() and output_dir.isprintable():
        return None
    return f"output_dir={output_dir!r} is no path that can be read in a line; use one such as output_dir=outputs"
