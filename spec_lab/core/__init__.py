"""Types and protocols shared by every part; imports torch only."""
