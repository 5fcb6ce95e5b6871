"""The command line as a library, which the programs use: help, typo checks, composing, folders of runs."""
