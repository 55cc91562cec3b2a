"""Kernels for the networks of couplings."""
