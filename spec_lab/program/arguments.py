"""The smaller programs parse their arguments here, and refuse in one line, as the lab does."""

from __future__ import annotations

import argparse
from typing import NoReturn

from spec_lab.errors import UserError


class LineParser(argparse.ArgumentParser):
    """Raises what argparse would print below the usage, which `--help` shows."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments.

        Raises:
            UserError: always, with the message and where to look.
        """
        raise UserError(f"{message}; {self.prog} --help shows what there is")
