"""How an error is put in a line."""

from __future__ import annotations

import pytest

from spec_lab.errors import describe_error


def test_an_error_with_a_message_is_its_class_and_message() -> None:
    assert describe_error(RuntimeError("out of luck")) == "RuntimeError: out of luck"


def test_an_error_without_a_message_names_the_line_it_was_raised_at() -> None:
    with pytest.raises(AssertionError) as caught:
        raise AssertionError
    assert describe_error(caught.value) == "AssertionError at test_errors.py:16"


def test_ctrl_c_is_its_class_wherever_it_struck() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        raise KeyboardInterrupt
    assert describe_error(caught.value) == "KeyboardInterrupt"
