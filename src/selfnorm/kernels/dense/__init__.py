"""Kernels for dense layers of D features, in the order in which a training step runs them.

products             a batch times square matrices, with what follows each product: all of the forward and backward passes
selfnorm             the self-normalizing layer, made of them
relative             the layer with the relative gradient
tracking             the layer with a tracked inverse, and the inverse's update
bias                 gradients of biases, for the last two
factored             weight gradients as factors, left for the optimiser; imports no Triton
gradient             such a gradient multiplied out
adam                 Adam's update, which multiplies the factors itself, and the check before it
small_determinants   log-determinants of small matrices, for layers of all kinds
"""
