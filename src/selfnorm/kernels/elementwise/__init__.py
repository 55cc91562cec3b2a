"""Kernels for activations."""
