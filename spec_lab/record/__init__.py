"""What a run records: metric definitions, provenance, sinks, tables and plots. Importing any of it does not load torch."""
