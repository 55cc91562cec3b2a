"""Timings: of training steps and samples, of layers as they grow, and of other libraries in the same run."""
