"""Computes what another rule that does not draw would have accepted in a run: verify rows, kept and judged again."""
