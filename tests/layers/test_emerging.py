"""Autoregressive and emerging convolutions: masks, solvers against a substitution pixel by pixel, gradients, refusals."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from selfnorm import Chain, Conv1x1, EmergingConv2d, SingularWeightError
from selfnorm.layers import emerging
from selfnorm.layers.emerging import AutoregressiveConv2d, AutoregressiveSolve, solve_by_fronts, solve_by_rows
from selfnorm.linalg.convmatrix import Geometry
from support.oracles import dense_matrix

MASKS = ("quadrant", "raster")
SOLVERS = {"rows": lambda z, w, mask: solve_by_rows(z, w), "fronts": solve_by_fronts}
# Kernel and image: images smaller than the kernel, kernels of one row, column or tap.
SIZES = [
    ((3, 3), (2, 5, 4)),
    ((5, 5), (3, 6, 7)),
    ((3, 5), (2, 4, 6)),
    ((5, 3), (1, 6, 4)),
    ((1, 3), (2, 3, 4)),
    ((3, 1), (2, 4, 3)),
    ((1, 1), (4, 2, 3)),
    ((7, 5), (2, 2, 1)),
    ((3, 3), (2, 1, 1)),
    ((3, 7), (1, 3, 2)),
]


def moved(layer):
    """Away from the identity, where many mistakes would not show."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def made(channels, kernel_size, mask="quadrant", mirrored=False, **options):
    return moved(AutoregressiveConv2d(channels, kernel_size, mirrored, mask=mask, **options))


def kernel(layer):
    return torch.where(layer.tap_mask, layer.weight, 0.0)


def matrix(layer, size):
    """T(w) from (C, H, W) order to (H, W, C) order, in which it is triangular."""
    T = dense_matrix(kernel(layer), size, Geometry())
    order = torch.arange(len(T)).reshape(-1, *size).permute(1, 2, 0).flatten()
    return T[order][:, order]


def substitute(z, w):
    """T(w)⁻¹z for an unmirrored kernel, one pixel after another from the last, without regard for speed."""
    _, _, height, width = z.shape
    rows, columns = w.shape[2] // 2, w.shape[3] // 2
    centre, rest = w[:, :, rows, columns], w.clone()
    rest[:, :, rows, columns] = 0
    padded = F.pad(torch.zeros_like(z), (columns, columns, rows, rows))
    for i, j in itertools.product(reversed(range(height)), reversed(range(width))):
        window = padded[:, :, i : i + w.shape[2], j : j + w.shape[3]]
        right = z[:, :, i, j] - torch.einsum("oikl,nikl->no", rest, window)
        padded[:, :, i + rows, j + columns] = torch.linalg.solve(centre, right.mT).mT
    return padded[:, :, rows : rows + height, columns : columns + width]


def test_the_quadrant_mask_reads_at_or_after_the_centre_in_both_axes():
    tap_mask = AutoregressiveConv2d(2, (3, 5)).tap_mask
    for o, i, k, m in itertools.product(range(2), range(2), range(3), range(5)):
        expected = i >= o if (k, m) == (1, 2) else k >= 1 and m >= 2
        assert tap_mask[o, i, k, m] == expected


def test_the_raster_mask_reads_all_that_follows_in_reading_order():
    tap_mask = AutoregressiveConv2d(2, (3, 5), mask="raster").tap_mask
    for o, i, k, m in itertools.product(range(2), range(2), range(3), range(5)):
        expected = i >= o if (k, m) == (1, 2) else (k, m) > (1, 2)
        assert tap_mask[o, i, k, m] == expected


@pytest.mark.parametrize("mask", MASKS)
def test_the_mirrored_mask_is_the_transposes(mask):
    tap_mask = AutoregressiveConv2d(3, (3, 5), mask=mask).tap_mask
    mirrored = AutoregressiveConv2d(3, (3, 5), mirrored=True, mask=mask).tap_mask
    for o, i, k, m in itertools.product(range(3), range(3), range(3), range(5)):
        assert mirrored[o, i, k, m] == tap_mask[i, o, 2 - k, 4 - m]


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("kernel_size", "shape"), SIZES)
def test_the_jacobian_is_triangular_and_its_diagonal_the_centres(kernel_size, shape, mask, mirrored):
    layer, x = made(shape[0], kernel_size, mask, mirrored), torch.randn(2, *shape)
    order = torch.arange(x[0].numel()).reshape(shape).permute(1, 2, 0).flatten()
    jacobian = torch.autograd.functional.jacobian(lambda v: layer(v)[0].flatten(), x[:1]).reshape(len(order), -1)
    jacobian = jacobian[order][:, order]
    assert_close(jacobian, jacobian.tril() if mirrored else jacobian.triu(), rtol=0, atol=0)
    centre = layer.weight[:, :, kernel_size[0] // 2, kernel_size[1] // 2].diagonal()
    assert_close(jacobian.diagonal(), centre.repeat(shape[1] * shape[2]))
    expected = torch.linalg.slogdet(matrix(layer, shape[1:])).logabsdet
    assert_close(layer(x)[1], expected.expand(2), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("kernel_size", "shape"), [*SIZES, ((3, 3), (3, 12, 9)), ((3, 3), (1, 28, 28))])
def test_the_solvers_agree_with_a_substitution(kernel_size, shape, mask, solver):
    w, z = kernel(made(shape[0], kernel_size, mask)), torch.randn(3, *shape)
    assert_close(SOLVERS[solver](z, w, mask), substitute(z, w), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("row", [0, 10**6], ids=["fronts", "rows"])
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_the_inverse_in_both_precisions(mask, mirrored, row, monkeypatch, device):
    monkeypatch.setattr(emerging, "MAX_ROW_LENGTH", row)
    layer, x = made(3, 3, mask, mirrored).to(device), torch.randn(4, 3, 8, 6, device=device)
    assert_close(layer.inverse(layer(x)[0])[0], x, rtol=1e-10, atol=1e-10)
    layer, x = layer.float(), x.float()
    back, log_det = layer.inverse(layer(x)[0])
    assert back.dtype == log_det.dtype == torch.float32
    assert_close(back, x, rtol=1e-5, atol=1e-5)


def test_as_many_fronts_as_the_docstring_says():
    for mask, rounds in (("quadrant", 9 + 7 - 1), ("raster", 3 * 8 + 7)):
        _, sizes, _, _ = emerging._fronts((9, 7), (3, 5), mask)
        assert len(sizes) == rounds and sum(sizes) == 63


def test_short_rows_are_solved_for_at_once_and_long_ones_by_fronts(monkeypatch):
    called = []
    for name in ("solve_by_rows", "solve_by_fronts"):
        original = getattr(emerging, name)
        monkeypatch.setattr(emerging, name, lambda *args, name=name, original=original: called.append(name) or original(*args))
    layer = AutoregressiveConv2d(2)
    layer.inverse(torch.randn(1, 2, 3, emerging.MAX_ROW_LENGTH // 2))
    layer.inverse(torch.randn(1, 2, 3, emerging.MAX_ROW_LENGTH // 2 + 1))
    assert called == ["solve_by_rows", "solve_by_fronts"]


@pytest.mark.parametrize("row", [0, 10**6], ids=["fronts", "rows"])
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel_size", [(3, 3), (5, 3)])
def test_the_inverses_gradient_is_that_of_a_dense_solve(kernel_size, mask, mirrored, row, monkeypatch):
    monkeypatch.setattr(emerging, "MAX_ROW_LENGTH", row)
    layer, z = made(2, kernel_size, mask, mirrored), torch.randn(3, 2, 5, 4, requires_grad=True)
    weights = torch.randn_like(z)
    T = dense_matrix(kernel(layer), (5, 4), Geometry())
    x = torch.linalg.solve(T, (z - layer.bias[:, None, None]).flatten(1).mT).mT.reshape(z.shape)
    expected = torch.autograd.grad((x * weights).sum() - 2 * torch.linalg.slogdet(T).logabsdet, [z, layer.weight, layer.bias])
    x, log_det = layer.inverse(z)
    ours = torch.autograd.grad((x * weights).sum() + 2 * log_det.mean(), [z, layer.weight, layer.bias])
    assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["forward", "inverse", "surrogate"])
@pytest.mark.parametrize("mask", MASKS)
def test_entries_outside_the_mask_neither_count_nor_learn(mask, method):
    layer, x = made(3, 3, mask), torch.randn(2, 3, 4, 5)
    out, log_det = getattr(layer, method)(x)[:2]
    (out.square().sum() + log_det.sum()).backward()
    assert (layer.weight.grad[~layer.tap_mask] == 0).all()
    assert (layer.weight.grad[layer.tap_mask] != 0).all()
    with torch.no_grad():
        layer.weight[~layer.tap_mask] = torch.nan
    assert_close(getattr(layer, method)(x)[:2], (out, log_det))


def test_second_derivatives_and_transforms_of_the_inverse():
    layer, z = made(2, 3, "raster"), torch.randn(2, 2, 3, 4, requires_grad=True)
    w = kernel(layer).detach().requires_grad_()

    def solve(z, w):
        return AutoregressiveSolve.apply(z, torch.where(layer.tap_mask, w, 0.0), False, "raster")

    assert torch.autograd.gradcheck(solve, (z, w))
    assert torch.autograd.gradgradcheck(solve, (z, w))
    for row in (0, 10**6):
        jacobian = torch.func.jacrev(lambda z, row=row: _with_row(row, solve, z, w))(z[:1]).reshape(24, 24)
        T = dense_matrix(w, (3, 4), Geometry())
        assert_close(jacobian @ T, torch.eye(24), rtol=1e-9, atol=1e-9)


def _with_row(row, function, *arguments):
    kept, emerging.MAX_ROW_LENGTH = emerging.MAX_ROW_LENGTH, row
    try:
        return function(*arguments)
    finally:
        emerging.MAX_ROW_LENGTH = kept


@pytest.mark.parametrize("mix", [True, False])
@pytest.mark.parametrize("kernel_size", [(3, 3), (3, 5)])
def test_the_two_halves_together_read_all_around(kernel_size, mix):
    layer, (rows, columns) = moved(EmergingConv2d(2, kernel_size, mix)), (kernel_size[0] // 2, kernel_size[1] // 2)
    x = torch.randn(1, 2, 9, 9)
    jacobian = torch.autograd.functional.jacobian(lambda v: layer(v)[0][0, :, 4, 4], x)[:, 0]  # (out, in, H, W)
    expected = torch.zeros(2, 2, 9, 9, dtype=torch.bool)
    expected[:, :, 4 - rows : 5 + rows, 4 - columns : 5 + columns] = True
    assert_close(jacobian != 0, expected)


def test_the_parts_are_what_the_paper_says():
    layer = EmergingConv2d(3, 5, mask="raster")
    mix, first, second = layer
    assert isinstance(mix, Conv1x1) and isinstance(layer, Chain)
    assert (first.mirrored, second.mirrored) == (False, True)
    assert first.bias is None and second.bias is not None
    assert {first.mask, second.mask} == {"raster"} and {first.kernel_size, second.kernel_size} == {(5, 5)}
    assert len(EmergingConv2d(3, mix=False)) == 2
    assert set(first.state_dict()) == {"weight"}


def test_it_starts_near_the_identity():
    x = torch.randn(8, 4, 6, 6)
    z, log_det = EmergingConv2d(4, mix=False)(x)
    assert 0 < (z - x).norm() / x.norm() < 0.05
    assert log_det.abs().max() < 0.1 * x[0].numel()


@pytest.mark.parametrize("method", ["forward", "inverse"])
def test_a_zero_on_the_diagonal_is_refused_by_name(method):
    layer = EmergingConv2d(3)
    with torch.no_grad():
        layer[2].weight[1, 1, 1, 1] = 0
    with pytest.raises(SingularWeightError, match=r"layer 2: AutoregressiveConv2d\(3, .*\(1 of 3 entries") as error:
        getattr(layer, method)(torch.randn(2, 3, 4, 4))
    assert "expected an invertible weight, got a singular one" in str(error.value)


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "unique"), f"{name} reads the device"
        return func(*args, **(kwargs or {}))


def test_the_surrogate_never_reads_the_device():
    layer, x = EmergingConv2d(3), torch.randn(2, 3, 4, 4)
    with torch.no_grad():
        layer[1].weight[0, 0, 1, 1] = 0
    with NoReads():
        z, log_det, _ = layer.surrogate(x)
        (z.sum() + log_det.sum()).backward()
    assert log_det.isneginf().all()
    with pytest.raises(AssertionError, match="reads the device"), NoReads():
        layer[1](x)


def test_half_precision_is_kept_out():
    layer, x = made(3, 3).float(), torch.randn(2, 3, 4, 4).float()
    expected = layer(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(layer(x)[0], expected)
        assert_close(layer.surrogate(x).z, expected)
        assert_close(layer.inverse(expected)[0], x, rtol=1e-5, atol=1e-5)
        rounded = expected.bfloat16()  # as a neighbour that runs in half precision would hand it on
        assert_close(layer.inverse(rounded)[0], layer.inverse(rounded.float())[0])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((2, 4), {}, "expected odd sides for kernel_size, got 4"),
        ((2, (3, 2)), {}, r"expected odd sides for kernel_size, got \(3, 2\)"),
        ((0,), {}, "expected channels to be a whole number of at least 1, got 0"),
        ((2,), {"mask": "causal"}, "expected mask 'quadrant' or 'raster', got 'causal'"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, options, message):
    with pytest.raises(ValueError, match=f"^AutoregressiveConv2d: {message}"):
        AutoregressiveConv2d(*arguments, **options)
    with pytest.raises(ValueError, match=f"^EmergingConv2d: .*{message}"):
        EmergingConv2d(*arguments, **options)


def test_another_dtype_is_refused_by_name():
    with pytest.raises(ValueError, match=r"AutoregressiveConv2d\(2, .*\): expected torch.float64 on cpu, got torch.float32"):
        AutoregressiveConv2d(2)(torch.randn(2, 2, 3, 3).float())


def test_a_substitution_that_overflows_is_not_blamed_on_its_input():
    layer = AutoregressiveConv2d(1, 3)
    with torch.no_grad():
        layer.weight.fill_(1e9)
        layer.weight[0, 0, 1, 1] = 1.0
    with pytest.raises(ValueError, match=r"AutoregressiveConv2d\(1.*other taps outweigh the centre"):
        layer.inverse(torch.ones(1, 1, 40, 40))
