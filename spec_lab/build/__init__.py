"""Builds what a run asks for: its target, its workload, its engines. `Lab` is what the options' `build` gets."""
