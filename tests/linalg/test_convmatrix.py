"""The convolution algebra against T(w) built by convolving the identity, over shapes, dilations, groups and both paddings."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.testing import assert_close

from selfnorm.linalg.convmatrix import (
    Geometry,
    circular_symbols,
    conv_matrix,
    convolve,
    dirac,
    flip,
    kernel_gradient,
    least_squares_inverse,
    resize_kernel,
    tap_counts,
)

SIDES = (1, 3, 5, 7)


@st.composite
def problems(draw, padding_modes=("zeros", "circular")):
    """A random convolution: (w, image size, geometry)."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    kernel_size = draw(st.tuples(st.sampled_from(SIDES), st.sampled_from(SIDES)))
    dilation = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    groups = draw(st.integers(1, 3))
    channels = groups * draw(st.integers(1, 2))
    mode = draw(st.sampled_from(padding_modes))
    # A circular kernel must fit the image; a zero-padded one may reach far beyond it.
    least = [d * (k - 1) + 1 if mode == "circular" else 1 for k, d in zip(kernel_size, dilation, strict=True)]
    size = tuple(draw(st.integers(low, low + 4)) for low in least)
    if math.prod(size) > 200:
        size = tuple(least)
    w = torch.randn(channels, channels // groups, *kernel_size, dtype=torch.float64)
    return w, size, Geometry(dilation, groups, mode)


def torch_conv(x, w, geometry):
    """The reference: torch's own module."""
    padding = tuple(d * (k // 2) for k, d in zip(w.shape[2:], geometry.dilation, strict=True))
    channels = w.shape[0]
    module = torch.nn.Conv2d(
        channels,
        channels,
        tuple(w.shape[2:]),
        padding=padding,
        dilation=geometry.dilation,
        groups=geometry.groups,
        padding_mode=geometry.padding_mode,
        bias=False,
    )
    return torch.func.functional_call(module, {"weight": w}, x)


def dense(w, size, geometry):
    """T(w) (D, D), by convolving the identity: column j is the image of the j-th unit vector."""
    channels = w.shape[0]
    dimensions = channels * math.prod(size)
    identity = torch.eye(dimensions, dtype=w.dtype).reshape(dimensions, channels, *size)
    return torch_conv(identity, w, geometry).reshape(dimensions, dimensions).T


@settings(max_examples=60, deadline=None)
@given(problems())
def test_convolve_is_the_matrix(problem):
    w, size, geometry = problem
    x = torch.randn(2, w.shape[0], *size)
    assert_close(convolve(x, w, geometry), torch_conv(x, w, geometry))
    assert_close(convolve(x, w, geometry).flatten(1), x.flatten(1) @ dense(w, size, geometry).T)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_conv_matrix_is_block_diagonal_over_groups(problem):
    w, size, geometry = problem
    assert_close(torch.block_diag(*conv_matrix(w, size, geometry)), dense(w, size, geometry))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_flip_is_the_adjoint(problem):
    w, size, geometry = problem
    x, y = torch.randn(2, 1, w.shape[0], *size)
    left = (convolve(x, w, geometry) * y).sum()
    right = (x * convolve(y, flip(w, geometry.groups), geometry)).sum()
    assert_close(left, right)
    assert_close(dense(flip(w, geometry.groups), size, geometry), dense(w, size, geometry).T)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_tap_counts_by_brute_force(problem):
    """Give every tap a different number and count how often it occurs in T(w)."""
    w, size, geometry = problem
    numbers = torch.arange(1, w.numel() + 1, dtype=torch.float64).reshape(w.shape)
    matrix = dense(numbers, size, geometry)
    counts = torch.bincount(matrix.flatten().round().long(), minlength=w.numel() + 1)[1:].reshape(w.shape)
    expected = tap_counts((w.shape[2], w.shape[3]), size, geometry)
    assert torch.equal(counts, expected.expand(w.shape))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # from torch, on its first forward-mode derivative
@settings(max_examples=40, deadline=None)
@given(problems())
def test_derivatives_of_convolve_are_torchs(problem):
    """First, second and forward-mode derivatives, and under vmap."""
    w, size, geometry = problem
    x, grad, more = torch.randn(3, 2, w.shape[0], *size)
    inputs = (x.requires_grad_(), w.requires_grad_())

    def derivatives(function):
        first = torch.autograd.grad(function(*inputs, geometry).tanh(), inputs, grad, create_graph=True)
        second = torch.autograd.grad((first[0] * more).sum() + first[1].square().sum(), inputs)
        return [*first, *second]

    for ours, theirs in zip(derivatives(convolve), derivatives(torch_conv), strict=True):
        assert_close(ours, theirs)

    def gradient(function):
        return lambda x: torch.func.grad(lambda x: function(x[None], w.detach(), geometry).tanh().sum())(x)

    x, w = x.detach(), w.detach()
    assert_close(torch.vmap(gradient(convolve))(x), torch.stack([gradient(torch_conv)(each) for each in x]))
    with forward_ad.dual_level():
        duals = forward_ad.make_dual(x.requires_grad_(), more), forward_ad.make_dual(w, w.flip(0))
        tangent = forward_ad.unpack_dual(convolve(*duals, geometry)).tangent
    assert_close(tangent, torch_conv(more, w, geometry) + torch_conv(x, w.flip(0), geometry))


@settings(max_examples=40, deadline=None)
@given(problems())
def test_kernel_gradient_is_autograds(problem):
    w, size, geometry = problem
    x, grad = torch.randn(2, 3, w.shape[0], *size)
    w.requires_grad_()
    (expected,) = torch.autograd.grad((torch_conv(x, w, geometry) * grad).sum(), w)
    assert_close(kernel_gradient(x, grad, (w.shape[2], w.shape[3]), geometry), expected)


@settings(max_examples=40, deadline=None)
@given(problems(padding_modes=("circular",)))
def test_symbols_diagonalise_circular_convolutions(problem):
    w, size, geometry = problem
    symbols = circular_symbols(w, size, geometry)
    x = torch.randn(2, w.shape[0], *size)
    spectrum = torch.fft.fft2(x).reshape(2, geometry.groups, -1, math.prod(size))
    product = torch.einsum("gfoi,ngif->ngof", symbols, spectrum)
    assert_close(torch.fft.ifft2(product.reshape(x.shape).to(torch.complex128)).real, convolve(x, w, geometry))
    eigenvalues = torch.linalg.slogdet(dense(w, size, geometry)).logabsdet
    assert_close(torch.linalg.slogdet(symbols).logabsdet.sum(), eigenvalues, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kernel_size", [(1, 1), (3, 3), (3, 5)])
@pytest.mark.parametrize("groups", [1, 2])
def test_dirac_is_the_identity(kernel_size, groups):
    x = torch.randn(2, 4, 5, 6)
    assert_close(convolve(x, dirac(4, kernel_size, groups), Geometry(groups=groups)), x)


def test_resize_kernel_cuts_and_pads_around_the_centre():
    w = torch.randn(2, 2, 3, 5)
    larger = resize_kernel(w, (7, 7))
    assert larger.shape == (2, 2, 7, 7)
    assert_close(larger[:, :, 2:5, 1:6], w)
    assert_close(larger.sum(), w.sum())
    assert_close(resize_kernel(larger, (3, 5)), w)
    assert_close(resize_kernel(w, (5, 3)), F.pad(w[..., 1:4], (0, 0, 1, 1)))


@pytest.mark.parametrize("groups", [1, 2])
def test_least_squares_inverse_is_the_exact_one_for_1x1(groups):
    w = torch.randn(4, 4 // groups, 1, 1)
    r = least_squares_inverse(w, (1, 1), groups)
    x = torch.randn(2, 4, 3, 3)
    assert_close(convolve(convolve(x, w, Geometry(groups=groups)), r, Geometry(groups=groups)), x)


@pytest.mark.parametrize("groups", [1, 2])
def test_least_squares_inverse_cannot_be_improved(groups):
    """On a wide plane, no small change of r brings its composition with w closer to the identity."""
    w = dirac(4, (3, 3), groups) + 0.1 * torch.randn(4, 4 // groups, 3, 3)
    r = least_squares_inverse(w, (5, 3), groups)
    geometry = Geometry(groups=groups)
    impulse = torch.zeros(4, 4, 15, 15)
    impulse[range(4), range(4), 7, 7] = 1

    def distance(kernel):
        return (convolve(convolve(impulse, w, geometry), kernel, geometry) - impulse).square().sum()

    best = distance(r)
    assert best < distance(flip(resize_kernel(w, (5, 3)), groups))
    assert all(best < distance(r + 1e-3 * torch.randn_like(r)) for _ in range(20))
    error = [distance(least_squares_inverse(w, (k, k), groups)) for k in (1, 3, 5, 7)]
    assert error == sorted(error, reverse=True)
