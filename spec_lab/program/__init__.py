"""The command line as a library: help, typos, composing, folders of runs. Programs are made of it."""
