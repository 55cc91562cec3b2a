"""The layers, one idea per file."""
