"""Glow's coupling network, 3×3 → ReLU → 1×1 → ReLU → 3×3, and its affine map, as matrix products over pixels as rows.

A = gather(input)    H₁ = relu(A·W₁ᵀ + b₁)    H₂ = relu(H₁·W₂ᵀ + b₂)    z, log_det = head(H₂·W₃ᵀ, x)

choice   the network's parameters, and whether kernels can evaluate it; imports no Triton
affine   the whole map as one autograd function, and its inverse
weights  W₁, W₂, W₃ as matrices, and their gradients back
columns  3×3 convolutions as products: gather and scatter
hidden   products of the backward pass through H₂ and H₁
head     from the columns of the last convolution to z and log_det, and backward
"""
