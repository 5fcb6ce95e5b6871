"""The parts of a decoder in C, for a CPU: compiled for the machine at hand, and called from Python."""
