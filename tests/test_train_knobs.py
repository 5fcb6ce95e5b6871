"""Whatever is typed for a knob of a training, it is composed, or refused in one line with exit code 2."""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_lab.train.__main__ import main
from spec_lab.train.menu import train_menu
from spec_lab.train.pipeline import Pipeline
from tests.damage import TYPED

KEYS = sorted(train_menu().keys)
OPTIONS = {"drafter": "eagle3", "target": "pocket"}


def trained(arguments: list[str]) -> tuple[int, str]:
    """The exit code and what stands on stderr, of a training that is not run; it leaves nothing behind."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.chdir(folder)
        patch.setattr(Pipeline, "run", lambda self: None)
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = main(arguments)
        assert list(Path(folder).iterdir()) == []
    return code, errors.getvalue()


@given(st.sampled_from(KEYS), TYPED)
@settings(max_examples=8, deadline=None)
@example("seed", str(math.nan))
@example("num_workers", "9" * 6000)
@example("drafter.kv_source_layers", "[1,[2,nan]]")
@example("drafter.kv_source_layers", "${oc.env:HOME}")
@example("generations.row_length", "${nope}")
@example("device", "\udcff")
def test_a_knob_is_composed_or_refused_in_one_line(key: str, value: str) -> None:
    owners = train_menu().keys[key].defaults
    chosen = OPTIONS | ({key.partition(".")[0]: next(iter(owners))} if "" not in owners else {})
    code, errors = trained([*(f"{group}={option}" for group, option in chosen.items()), f"{key}={value}"])
    assert code in (0, 2)
    assert errors == "" if code == 0 else errors.startswith("refused: ") and errors.count("\n") == 1
