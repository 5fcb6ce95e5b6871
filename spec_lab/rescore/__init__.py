"""Computes which drafts another deterministic rule would have accepted in a run, by judging recorded verify rows."""
