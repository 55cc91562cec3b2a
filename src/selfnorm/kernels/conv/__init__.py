"""Kernels for convolutions of small images."""
