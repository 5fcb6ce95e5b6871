"""The menu holds what can be chosen, without torch: schema, forms of rows, registry, refusals, and what a run chose."""
