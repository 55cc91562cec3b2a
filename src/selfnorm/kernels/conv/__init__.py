"""Kernels for convolutions of small images, where those of a library take longer to start than to run.

choice       whether they can replace PyTorch; imports no Triton
tiles        shared helpers: tile sizes, products of a tile, sums of partial results
convolution  one convolution, with a log-determinant where it is cheap
selfnorm     the self-normalizing convolution
tracked      the convolution whose inverse is tracked
series       the first terms of a convolution's exponential
norm_limit   the kernel of that exponential, scaled to a limited norm
"""
