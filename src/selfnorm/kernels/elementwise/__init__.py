"""Kernels for maps of each element by itself: value and log-determinant in one pass, gradients in another.

leaky_relu    the smooth leaky ReLU
actnorm       ActNorm
spline        the rational-quadratic spline; spline_knots has the functions that its kernels are made of
shared        tiles, elementary functions and memory orders
"""
