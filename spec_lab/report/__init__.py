"""Tables and plots of recorded runs. Reads records only; imports no torch."""
