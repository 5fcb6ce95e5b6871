"""Triton kernels of the lab, each with a torch reference. Depends only on torch and triton, not on spec_lab."""
