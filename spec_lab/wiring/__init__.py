"""The makers that options share, which lead from what a run chose to an engine."""
