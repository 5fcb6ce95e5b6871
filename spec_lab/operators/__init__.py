"""Replaces torch forms and parts of models by kernels."""
