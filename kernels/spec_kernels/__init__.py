"""Triton kernels of the lab, and parts of a decoder in C. Depends only on torch and triton, not on spec_lab."""
