"""Each kernel of the coupling network against plain PyTorch in float64."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from selfnorm.runtime.precision import precision

pytestmark = pytest.mark.usefixtures("poisoned")
IMAGES = [(2, 3, 4, 5), (1, 1, 1, 1), (3, 2, 1, 7), (2, 9, 3, 2), (5, 4, 7, 7)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def kernel(device, kernels):
    """All of a coupling's kernels, with products rounded as tensor cores do."""
    from selfnorm.kernels.coupling import columns, head, hidden, weights

    with precision("tf32"):
        yield SimpleNamespace(**{**vars(weights), **vars(hidden), **vars(head), **vars(columns)})


def draw(device, *shape, dtype=torch.float32):
    """Small whole numbers and halves: bfloat16 and TF32 hold them exactly, and so a float32 sum of their products is exact."""
    return (torch.randint(-4, 5, shape) / 2).to(device, dtype)


def neighbourhoods(x):
    """(N, C, H, W) → (NHW, 9C), column s·C + i."""
    n, channels, height, width = x.shape
    columns = F.unfold(x, 3, padding=1).view(n, channels, 9, height * width)
    return columns.permute(0, 3, 2, 1).reshape(n * height * width, 9 * channels)


def expect_padded(got, expected):
    assert torch.equal(got[..., : expected.shape[-1]].double(), expected)
    assert not got[..., expected.shape[-1] :].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", IMAGES)
def test_gather_columns(device, kernel, shape, dtype):
    x = draw(device, *shape)
    for given in (x, x.to(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3)):
        out = kernel.gather_columns(given, dtype)
        assert out.dtype == dtype and out.shape[1] % 16 == 0
        expect_padded(out, neighbourhoods(x.double()))


@pytest.mark.parametrize("shape", IMAGES)
def test_scattering_is_the_transpose_of_gathering_and_adds_up_parts(device, kernel, shape):
    n, channels, height, width = shape
    columns = draw(device, 3, n * height * width, kernel.padded_columns(9 * channels))
    _, expected = torch.autograd.functional.vjp(
        lambda x: neighbourhoods(x), torch.zeros(shape, device=device), columns.sum(0)[:, : 9 * channels].double()
    )
    out = torch.empty(n, channels + 2, height, width, dtype=torch.float32, device=device)
    add = draw(device, n, channels, width, height).transpose(2, 3)
    kernel.scatter_columns(columns, out[:, 1:-1], add=add)
    assert torch.equal(out[:, 1:-1].double(), expected + add)
    assert out[:, 0].isnan().all() and out[:, -1].isnan().all()  # what is not its own it leaves
    alone = torch.empty(shape, dtype=torch.float32, device=device)
    kernel.scatter_columns(columns, alone)
    assert torch.equal(alone.double(), expected)


def head_by_hand(columns, bias, log_scale, x, stay):
    """columns (NHW, 18C): tap s, then even and odd outputs, each in order."""
    n, channels, height, width = x.shape
    changing = channels - stay
    shape = (n, 2 * changing, height, width)
    _, summed = torch.autograd.functional.vjp(neighbourhoods, torch.zeros(shape, device=x.device), columns, create_graph=True)
    order = torch.arange(2 * changing).view(changing, 2).t().flatten()  # 0, 2, …, 1, 3, …
    h = (summed + bias[order][:, None, None]) * (3 * log_scale[order]).exp()[:, None, None]
    log_s, t = 2 * torch.tanh(h[:, :changing] / 2), h[:, changing:]
    z = torch.cat([x[:, :stay], x[:, stay:] * log_s.exp() + t], dim=1)
    return z, log_s.sum((1, 2, 3)), h, summed


@pytest.mark.parametrize("stay", [0, 1, 3])
@pytest.mark.parametrize("shape", IMAGES)
def test_head_and_its_gradient(device, kernel, shape, stay):
    n, changing, height, width = shape
    rows, channels = n * height * width, stay + changing
    columns = (
        (torch.randn(rows, kernel.padded_columns(18 * changing)) * 10 ** torch.empty(rows, 1).uniform_(-4, 0.5))
        .float()
        .to(device)
    )
    bias, log_scale = (0.1 * torch.randn(2, 2 * changing)).float().to(device)
    x = torch.randn(n, channels, width, height).float().to(device).transpose(2, 3)
    wide = [tensor.double().requires_grad_() for tensor in (columns[:, : 18 * changing], bias, log_scale, x)]
    z, log_det, h, summed = head_by_hand(*wide, stay)
    got_z, got_log_det, got_h = kernel.affine_head(columns, bias, log_scale, x, stay)
    assert_close(got_z.double(), z, rtol=2e-6, atol=1e-5)
    assert_close(got_log_det.double(), log_det, rtol=2e-6, atol=1e-5)
    assert_close(got_h.double(), h.permute(0, 2, 3, 1).reshape(rows, 2 * changing), rtol=2e-6, atol=1e-5)

    grad_z, grad_log_det = torch.randn(n, channels, width, height).to(device).transpose(2, 3), torch.randn(2 * n).to(device)[::2]
    grads = torch.autograd.grad([z, log_det], [*wide[1:], summed], [grad_z, grad_log_det])
    grad_x = torch.empty(n, channels, height, width, dtype=torch.float32, device=device)
    grad_y, sums = kernel.affine_head_backward(grad_z.float(), grad_log_det.float(), x, got_h, log_scale, grad_x, stay)
    assert grad_x[:, :stay].isnan().all()  # for another kernel to write
    assert_close(grad_x[:, stay:].double(), grads[2][:, stay:], rtol=1e-5, atol=1e-5)
    assert_close(grad_y.double(), grads[3].permute(0, 2, 3, 1).reshape(rows, 2 * changing), rtol=1e-5, atol=1e-5)
    assert_close(sums.sum(0).double(), torch.stack(grads[:2]), rtol=1e-4, atol=1e-4)


def test_a_tiny_log_scale_keeps_its_digits_and_a_huge_one_its_bound(device, kernel):
    h = torch.cat([torch.logspace(-8, 3, 45), torch.tensor([0.59, 0.6, 0.61])])
    h = torch.cat([h, -h, torch.zeros(2)]).view(-1, 1, 1, 1)
    columns = torch.zeros(len(h), 32)
    columns[:, 8] = h.flatten()  # the middle tap of the even output
    zero = torch.zeros(2).float().to(device)
    _, log_det, _ = kernel.affine_head(columns.float().to(device), zero, zero, torch.zeros_like(h).float().to(device), 0)
    assert_close(log_det.double().cpu(), 2 * torch.tanh(h.float().double().flatten() / 2), rtol=2e-6, atol=0)


def masks(device, rows, width, dtype):
    activation = draw(device, rows, width, dtype=dtype).relu()
    return activation, (activation > 0).double()


TILES = [None, (32, 16, 16, 4, 2), (16, 64, 32, 4, 2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("shape", TILES)
@pytest.mark.parametrize("sizes", [(5, 16, 3), (150, 48, 33), (70, 100, 70)])
def test_masked_product(device, kernel, sizes, shape, across, dtype):
    rows, inner, width = sizes
    a, activation, mask = draw(device, rows, inner, dtype=dtype), *masks(device, rows, width, dtype)
    b = draw(device, width, inner, dtype=dtype).t() if across else draw(device, inner, width, dtype=dtype)
    g, sums = kernel.masked_product(a, b, activation, shape and kernel.ProductTiles(*shape))
    expected = a.double() @ b.double() * mask
    assert torch.equal(sums.double().sum(0), expected.sum(0))
    assert g.dtype == dtype
    assert_close(g.double(), expected, rtol=0 if dtype == torch.float32 else 2**-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("shape", TILES)
@pytest.mark.parametrize("sizes", [(5, 16, 3), (150, 48, 33), (400, 112, 20)])
def test_last_layer_backward(device, kernel, sizes, shape, across, dtype):
    rows, inner, width = sizes
    columns, activation, mask = draw(device, rows, inner, dtype=dtype), *masks(device, rows, width, dtype)
    w = draw(device, width, inner, dtype=dtype).t() if across else draw(device, inner, width, dtype=dtype)
    g, sums, products = kernel.last_layer_backward(columns, w, activation, shape and kernel.ProductTiles(*shape))
    expected = columns.double() @ w.double() * mask
    assert_close(g.double(), expected, rtol=0 if dtype == torch.float32 else 2**-7, atol=0)
    assert torch.equal(sums.double().sum(0), expected.sum(0))
    assert torch.equal(products.double().sum(0), columns.double().t() @ activation.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("shape", TILES)
@pytest.mark.parametrize("sizes", [(5, 16, 3), (150, 48, 33), (230, 64, 70)])
def test_first_layer_backward(device, kernel, sizes, shape, across, dtype):
    rows, inner, width = sizes
    (activation, mask), columns = masks(device, rows, width, dtype), draw(device, rows, inner, dtype=dtype)
    g, w, first = (
        draw(device, rows, width, dtype=dtype),
        draw(device, width, width, dtype=dtype),
        draw(device, width, inner, dtype=dtype),
    )
    w = w.t() if across else w
    sums, products, input_parts = kernel.first_layer_backward(
        g, w, activation, columns, first, shape and kernel.ProductTiles(*shape)
    )
    hidden = g.double() @ w.double() * mask
    assert torch.equal(sums.double().sum(0), hidden.sum(0))
    # G itself is rounded to the products' precision on its way; in the interpreter to bfloat16 towards zero.
    relative = 1e-3 if dtype == torch.float32 else 2**-7
    for got, left, right in ((products, hidden.t(), columns), (input_parts, hidden, first)):
        bound = relative * (left.abs() @ right.double().abs()) + 1e-5
        assert ((got.double().sum(0) - left @ right.double()).abs() <= bound).all()


def test_in_full_float32_the_masked_product_is_torchs(device, kernel):
    a, b, activation = (torch.randn(*shape).float().to(device) for shape in ((9, 16), (16, 5), (9, 5)))
    with precision("float32"):
        assert not kernel.on_tensor_cores(torch.float32) and kernel.on_tensor_cores(torch.bfloat16)
        g, sums = kernel.masked_product(a, b, activation)
    assert_close(g.double(), a.double() @ b.double() * (activation > 0), rtol=1e-5, atol=1e-5)
    assert_close(sums.sum(0), g.sum(0))


WIDTHS = [(1, 1, 1), (33, 2, 3), (12, 7, 1), (600, 1, 2)]  # width, channels of the input, channels that change


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "inputs", "changing"), WIDTHS)
def test_pack_weights(device, kernel, width, inputs, changing, dtype):
    shapes = (width, inputs, 3, 3), (width,), (width, width, 1, 1), (width,), (2 * changing, width, 3, 3)
    weights = [draw(device, *shape) for shape in shapes]
    w1, b1, w2, b2, w3, w2_across, w3_across = kernel.pack_weights(*weights, dtype)
    assert {tensor.dtype for tensor in (w1, b1, w2, b2, w3, w2_across, w3_across)} == {dtype}
    first, second, last = weights[0].double(), weights[2].double().view(width, width), weights[4].double()
    expect_padded(w1, first.flatten(2).transpose(1, 2).flatten(1))
    assert torch.equal(b1.double(), weights[1].double()) and torch.equal(b2.double(), weights[3].double())
    assert torch.equal(w2.double(), second) and torch.equal(w2_across.double(), second)
    sorted_last = torch.cat([last[0::2], last[1::2]]).flatten(2).flip(2)  # (2C, D, 9), taps mirrored
    expect_padded(w3.t(), sorted_last.permute(1, 2, 0).flatten(1))
    expect_padded(w3_across.t(), sorted_last.permute(1, 2, 0).flatten(1))
    if dtype == torch.float32:
        assert w2_across.stride(0) == w3_across.stride(0) == 1  # TF32's tensor cores read along the inner axis


@pytest.mark.parametrize(("width", "inputs", "changing"), WIDTHS)
def test_unpacking_undoes_packing_and_adds_up_parts(device, kernel, width, inputs, changing):
    weights = [draw(device, width, inputs, 3, 3), draw(device, 2 * changing, width, 3, 3)]
    zeros = torch.zeros(width, dtype=torch.float32, device=device)
    square = torch.zeros(width, width, 1, 1, dtype=torch.float32, device=device)
    packed = kernel.pack_weights(weights[0], zeros, square, zeros, weights[1], torch.float32)
    first = packed[0] * torch.arange(1, 4, dtype=torch.float32, device=device)[:, None, None]
    last = packed[4] * torch.arange(1, 20, dtype=torch.float32, device=device)[:, None, None]
    sums = draw(device, 70, width), draw(device, 3, width)
    head_sums = draw(device, 37, 2, 2 * changing)
    out = kernel.unpack_gradients(first, *sums, last, head_sums, inputs)
    expected = (6 * weights[0], sums[0].sum(0), sums[1].sum(0), 190 * weights[1], *head_sums.sum(0))
    for got, want in zip(out, expected, strict=True):
        assert got.is_contiguous() and torch.equal(got, want)
