"""Chooses the kernel that replaces each torch form."""
