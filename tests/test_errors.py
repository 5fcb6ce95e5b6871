"""How an error is put in a line."""

from __future__ import annotations

from spec_lab.errors import describe_error


def test_an_error_with_a_message_is_its_class_and_message() -> None:
    assert describe_error(RuntimeError("out of luck")) == "RuntimeError: out of luck"


def test_an_error_without_a_message_names_the_line_it_was_raised_at() -> None:
    try:
        raise AssertionError
    except AssertionError as error:
        assert describe_error(error) == "AssertionError at test_errors.py:14"


def test_an_error_that_was_never_raised_is_its_class() -> None:
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt"
