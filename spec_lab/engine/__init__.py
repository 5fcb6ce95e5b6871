"""This package runs requests: the decode round, its scheduler, its slots and pages, and their timing."""
