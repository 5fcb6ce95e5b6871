"""Parts of a decoder in C, for a CPU: compiled on the machine that runs them, and called from Python."""
