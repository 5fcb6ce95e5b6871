"""Reads finished runs: one frame, from which all tables and figures are made."""
