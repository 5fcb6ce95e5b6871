"""The drafters."""
