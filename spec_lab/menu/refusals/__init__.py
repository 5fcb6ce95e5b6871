"""Checks for combinations of options that cannot work, before anything is loaded; one module for each kind of part."""
