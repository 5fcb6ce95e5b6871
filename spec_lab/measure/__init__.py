"""Measures a run, from its configuration to its record: timed passes, audit, profile."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences the profiler; torch reads it when it loads
