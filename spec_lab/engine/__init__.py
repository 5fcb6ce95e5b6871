"""Runs requests: the decode round, the scheduler, slots and pages, and stage timers."""
