"""How an error is put in a line."""

from __future__ import annotations

import pytest

from spec_lab.core.errors import describe_error, without_folders


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no /home/ann/x.json here", "no x.json here"),
        ("[Errno 2] No such file: '/home/ann/my data/x.json'", "[Errno 2] No such file: 'x.json'"),
        ("path=/mnt/a/b; use another", "path=b; use another"),
        ("(/a/b/c, /a/d/)", "(c, )"),
        ("https://host.org/a/b and a/b/c and 1/2 and ./a/b", "https://host.org/a/b and a/b/c and 1/2 and ./a/b"),
    ],
)
def test_a_record_shows_no_folders(text: str, shown: str) -> None:
    assert without_folders(text) == shown
    assert describe_error(ValueError(text)) == f"ValueError: {shown}"
