"""Everything for recording runs: metric definitions, provenance and sinks. It does not load torch."""
