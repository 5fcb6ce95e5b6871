"""Writes models and heads in the files of other engines: safetensors, GGUF, and other projects' layouts of heads."""
