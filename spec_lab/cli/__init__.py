"""The command line says what may be typed, how it becomes a `RunConfig`, and how a job's end becomes an exit code."""
