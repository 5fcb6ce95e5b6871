"""Reads `points=a,b`, which runs some of an experiment's points.

A point is a file that sets several knobs that belong together. Hydra names the choice by the folder of the files and
the package of their keys: for experiment=trees it is `experiment/trees/point@_global_`.
"""

from __future__ import annotations

from collections.abc import Sequence

from spec_lab.core.errors import UserError
from spec_lab.menu.nearest import hint, nearest, one_of
from spec_lab.program.options import conf_folder

KEY = "points"


def with_points(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with `points=` replaced by Hydra's name for that choice.

    Raises:
        UserError: there is no such point, `points=` is given twice, or no experiment with points was chosen.
    """
    typed = [text for text in overrides if text.startswith(f"{KEY}=")]
    if not typed:
        return list(overrides)
    if len(typed) > 1:
        raise UserError(f"{' '.join(typed)}: {KEY} is given twice; name all points in one list, such as {KEY}=a,b")
    (text,) = typed
    experiment = next((other.partition("=")[2] for other in overrides if other.startswith("experiment=")), "")
    points = points_of(experiment)
    if not points:
        having = one_of("experiment", filter(points_of, _experiments()))
        raise UserError(f"{text}: only experiments whose grid has points read it; add {having}")
    chosen = [point.strip() for point in text.partition("=")[2].split(",")]
    for point in chosen:
        if point not in points:
            near = nearest(point, points)
            remedy = hint(near) if near else f"; it takes some of {', '.join(points)}"
            raise UserError(f"{text}: experiment={experiment} has no point {point}{remedy}")
    others = [other for other in overrides if other != text]
    return [*others, f"experiment/{experiment}/point@_global_={','.join(dict.fromkeys(chosen))}"]


def points_of(experiment: str) -> list[str]:
    """Return the points of an experiment in alphabetical order; empty if it has none or does not exist."""
    if experiment not in _experiments():
        return []
    return sorted(file.stem for file in (conf_folder() / "experiment" / experiment / "point").glob("*.yaml"))


def _experiments() -> list[str]:
    return sorted(file.stem for file in (conf_folder() / "experiment").glob("*.yaml"))
