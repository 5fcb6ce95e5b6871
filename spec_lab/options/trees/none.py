"""tree=none: a round's drafts are a chain."""

from __future__ import annotations

from spec_lab.menu.option import TreeOption

ROW = TreeOption(name="none")
