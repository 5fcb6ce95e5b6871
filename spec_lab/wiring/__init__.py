"""Functions that build an engine and its parts from a run's choices; the options share them."""
