"""Decides whether an error is the user's, the machine's or ours, and describes it in one line."""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


class UserError(ValueError):
    """A request of the user cannot be carried out. The message names the knob or the file, and the remedy.

    The command line prints it in one line. It exits with code 2, or with 1 if a run had begun. Any other exception is
    our own failure and gets a traceback, unless `trouble_of` recognises it.
    """


class Breakdown(ArithmeticError):
    """A computation cannot continue, for instance since its numbers are no longer finite. It is not our mistake.

    The message says where it happened and what helps. It is printed in one line, with exit code 1.
    """


@dataclass(frozen=True, slots=True)
class Trouble:
    """An obstacle that is no mistake of this program, described in one line.

    Attributes:
        status: `refused` if another command helps; `failed` for a `Breakdown`, if the machine is the cause, or if the
            run had begun.
    """

    line: str
    status: Literal["refused", "failed"]


WORN_OUT = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE}
"""Errors of the system that do not depend on the command, such as a full disk."""
DISK_IS_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
KERNELS = "spec_kernels"
OURS = ("spec_lab", KERNELS)
NO_KERNELS = f"the package {KERNELS} cannot be imported; install the lab, or put kernels/ on PYTHONPATH"
"""In a checkout that is not installed, that package may not be on the path. Composing works without it."""
COMPOSERS = ("hydra", "omegaconf", "antlr4", "yaml")
"""Packages that read the command line and the option files. Their errors concern the user's input."""
QUOTED_PATH = re.compile(r"(?P<before>['\"])/[^'\"\n]*/(?P<name>[^'\"/\n]+)(?=['\"])")
BARE_PATH = re.compile(r"(?P<before>(?<![\w./:~-]))/(?:[^\s/'\",:;()\[\]]+/)+(?P<name>[^\s/'\",:;()\[\]]*)")
OF_RUST = re.compile(r"\(os error (\d+)\)$")
"""A library in Rust, such as safetensors, ends its message with the system's error number."""
LONGEST_OF_TORCH = 80
"""The most characters quoted from a message of torch, which can be pages long."""
NULL_IN_A_PATH = "embedded null "
"""The beginning of Python's ValueError for a path with a null byte, the only sign of it."""
OUT_OF_MEMORY = (
    *("not enough memory", "can't allocate memory", "cannot allocate memory"),
    *("out of memory", "failed to allocate"),
)


def trouble_of(error: BaseException) -> Trouble | None:
    """Return what `error` means for the user or the machine; None if it is our own mistake and needs a traceback.

    It imports no library to recognise its errors, so a program only loads the libraries it uses.
    """
    if isinstance(error, UserError):
        return Trouble(str(error), "refused")
    if isinstance(error, Breakdown):
        return Trouble(str(error), "failed")
    from spec_lab.core.hidden import hidden_library  # not above, since signals must be answered before any import

    if (hidden := hidden_library(error)) is not None:
        return Trouble(hidden, "refused")
    if _breaks_torch(error):
        return Trouble(_torch_is_broken(error), "refused")
    if isinstance(error, OSError) and error.errno is not None:
        return Trouble(describe_os_error(error), "failed" if error.errno in WORN_OUT else "refused")
    if (number := OF_RUST.search(str(error))) is not None:
        return Trouble(one_line(error), "failed" if int(number[1]) in WORN_OUT else "refused")
    if is_out_of_memory(error):
        reason = one_line(error) or "nothing is left"
        return Trouble(f"there is not enough memory ({reason}); lower the sizes, such as batch_size", "refused")
    if isinstance(error, ModuleNotFoundError) and error.name == KERNELS:
        return Trouble(NO_KERNELS, "refused")
    if isinstance(error, ValueError) and str(error).startswith(NULL_IN_A_PATH):
        return Trouble("a path has the null character, which no file name can have; leave it out", "refused")
    if isinstance(error, OverflowError):
        return Trouble(f"a number is too large ({one_line(error)}); use a smaller one", "refused")
    if is_of_composing(error):
        return Trouble(one_line(error) or type(error).__name__, "refused")
    return None


def _breaks_torch(error: BaseException) -> bool:
    """Return whether `error` was raised by the import of torch, which some of its environment variables can break."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(frame.f_globals.get("__name__") == "torch" and frame.f_code.co_name == "<module>" for frame in frames)


def _torch_is_broken(error: BaseException) -> str:
    named = [name for name in sorted(os.environ) if name.startswith(("TORCH", "PYTORCH"))]
    remedy = f"unset {', '.join(named)}" if named else "install it again, or give it more memory"
    return f"torch cannot be imported ({without_folders(one_line(error))[:LONGEST_OF_TORCH]}); {remedy}"


def is_full_disk(error: BaseException) -> bool:
    """Return whether `error` means a full disk. Python or a library in Rust may have raised it."""
    if isinstance(error, OSError):
        return error.errno in DISK_IS_FULL
    number = OF_RUST.search(str(error))
    return number is not None and int(number[1]) in DISK_IS_FULL


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on the host or on a GPU. torch raises a RuntimeError for both."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY)


@contextmanager
def enough_memory(problem: str) -> Iterator[None]:
    """Raise UserError with the message `problem` if an allocation inside fails."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(problem) from error


def is_of_composing(error: BaseException) -> bool:
    """Return whether a package in `COMPOSERS` raised `error`, or code that it called without our code in between.

    For wrong input these packages raise exceptions of their own, but also ValueError, AssertionError and others.
    """
    if any(_package(kind.__module__) in COMPOSERS for kind in type(error).__mro__):
        return True
    callers = [_package(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    beyond_ours = len(callers) - next((i for i, package in enumerate(reversed(callers)) if package in OURS), 0)
    return any(package in COMPOSERS for package in callers[beyond_ours : beyond_ours + 1])


def is_interruption(error: BaseException) -> bool:
    """Return whether an interruption, such as Ctrl-C, caused `error`. Cleaning up after it may have raised another
    exception."""
    return any(isinstance(one, KeyboardInterrupt) for one in behind(error))


def describe_error(error: BaseException) -> str:
    """Return the class of an exception with its message; without a message, the place where it was raised.

    Records contain this text, and other people may read them. So paths are cut to their last part.
    """
    kind, message = type(error).__name__, without_folders(str(error).strip())
    if message:
        return f"{kind}: {message}"
    places = traceback.extract_tb(error.__traceback__) if isinstance(error, Exception) else []
    return f"{kind} at {Path(places[-1].filename).name}:{places[-1].lineno}" if places else kind


def describe_os_error(error: OSError) -> str:
    """Describe the error like `FILE: No space left on device`. For a rename FILE is the target."""
    reason, place = error.strerror or type(error).__name__, error.filename2 or error.filename
    return reason if place is None else f"{place}: {reason}"


def one_line(message: object) -> str:
    r"""Return a message without line breaks, and with control characters escaped like `\x1b`."""
    return visible(" ".join(str(message).split()))


def visible(text: str, keep: str = "") -> str:
    r"""Return text from outside with control characters, which would affect a terminal or a page, escaped like `\x1b`.

    Args:
        keep: characters that are not escaped, such as a line break.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else _escaped(letter) for letter in text)


def without_folders(text: str) -> str:
    """Return `text` with the absolute paths in it cut to their last part."""
    for pattern in (QUOTED_PATH, BARE_PATH):
        text = pattern.sub(r"\g<before>\g<name>", text)
    return text


def behind(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, and recursively the exceptions it was raised from or while handling."""
    pending, seen = [error], set[int]()
    while pending:
        current = pending.pop()
        if id(current) not in seen:
            seen.add(id(current))
            yield current
            pending += [one for one in (current.__context__, current.__cause__) if one is not None]


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def _package(module: str) -> str:
    return module.partition(".")[0]
