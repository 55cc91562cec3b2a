"""Foundations that know nothing of layers or flows: checks, files, memory, precision, threads, CUDA streams and graphs."""
