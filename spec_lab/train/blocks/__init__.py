"""Training drafters of a whole block: the runtime's own models, run over packed rows of texts."""
