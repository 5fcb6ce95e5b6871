"""What a run records: metric definitions, provenance, sinks, tables and plots. None of it loads torch."""
