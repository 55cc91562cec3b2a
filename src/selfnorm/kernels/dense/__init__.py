"""Kernels for dense layers."""
