"""Makes what the notebooks show: of a folder of runs a figure, and the sentence that its numbers come to."""
