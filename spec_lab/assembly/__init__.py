"""From a configuration to parts: a row for each option, beside what builds it.

The rows import no torch, so that help, typo checks and refusals are instant. What builds an option is imported when it
is first asked for.
"""
