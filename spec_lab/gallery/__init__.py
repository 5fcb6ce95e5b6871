"""Makes the contents of the notebooks: figures from a folder of runs, and sentences that summarise the numbers."""
