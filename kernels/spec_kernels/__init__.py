"""Triton kernels of the lab, each beside its torch reference. Depends on torch and triton alone, never on spec_lab."""
