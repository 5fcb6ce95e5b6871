"""The options that a run can choose: schema, registry, refusals, and a run's resolved choices. It imports no torch."""
