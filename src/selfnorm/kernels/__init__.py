"""Triton kernels that replace plain PyTorch on a GPU where its separate operations waste time.

    dispatch      whether kernels can run on given tensors; imports no Triton
    dense         products of fully connected layers, their gradients and updates
    conv          convolutions of small images
    coupling      Glow's coupling network as matrix products
    elementwise   activations, ActNorm and splines
    objective     the training loss
    matrix_tiles  tiles of a matrix
    vectors       sums of vectors, and filling them
    numerics      arithmetic that kernels share

A module holds the kernels, their launchers and the autograd function that calls them. Most import Triton, so layers import them
only once `dispatch.usable`, or a family's `choice`, has said yes.
"""
