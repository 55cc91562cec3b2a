"""Triton kernels that take over from plain PyTorch where its single operations leave time on the table."""
