"""The names in a record that need no library to be known."""

from __future__ import annotations

from typing import Literal

THIS_RUN = "this run"
"""The name of the main configuration in tables that also have its references."""
Status = Literal["finished", "failed", "refused", "interrupted"]
SUMMARY_FILE = "summary.json"
CONFIG_FILE = "config.yaml"
REQUESTS_FILE = "requests.jsonl"
ROUNDS_FILE = "rounds.jsonl"
