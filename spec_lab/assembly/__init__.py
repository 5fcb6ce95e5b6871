"""This package makes parts of a configuration: each option has a row here, beside what builds it.

The rows import no torch, so that help, typo checks and refusals are instant. What builds an option is imported when it
is first asked for.
"""
