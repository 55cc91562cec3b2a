"""Exact log-determinants and inverses: amortised, never stale, and differentiable."""

import copy
import math

import pytest
import torch
from torch.testing import assert_close

from conftest import ACCELERATOR
from selfnorm import Chain, Conv1x1, ExactConv2d, ExactLinear, Flow, SelfNormConv2d, SelfNormLinear, SingularWeightError
from selfnorm.linalg.blocks import Circular, PerPixel
from selfnorm.linalg.convmatrix import Geometry
from support.oracles import dense_matrix, exact_log_likelihood

LAYERS = {
    "selfnorm-linear": (lambda: SelfNormLinear(6), (6,)),
    "exact-linear": (lambda: ExactLinear(6), (6,)),
    "selfnorm-conv": (lambda: SelfNormConv2d(2, 3), (2, 4, 5)),
    "exact-conv": (lambda: ExactConv2d(4, 3, groups=2, dilation=2), (4, 5, 4)),
    "circular": (lambda: ExactConv2d(2, (3, 5), padding_mode="circular"), (2, 4, 5)),
    "1x1": (lambda: Conv1x1(3), (3, 2, 4)),
}


@pytest.fixture(params=LAYERS)
def layer_and_x(request, device):
    make, shape = LAYERS[request.param]
    layer = make().to(device)
    with torch.no_grad():
        layer.weight.add_(0.1 * torch.randn_like(layer.weight))
    return layer.eval(), torch.randn(3, *shape, device=device)


def oracle_log_det(layer, x):
    W = layer.weight.detach().double()
    W = W if W.dim() == 2 else dense_matrix(W, (x.shape[2], x.shape[3]), layer.geometry)
    return torch.linalg.slogdet(W).logabsdet.item()


def assert_exact(layer, x):
    """log_det and inverse are those of the current weight."""
    z, log_det = layer(x)
    expected = oracle_log_det(layer, x)
    tolerance = 1e-9 if x.dtype == torch.float64 else 1e-4
    assert_close(log_det.double().cpu(), torch.full((len(x),), expected), rtol=tolerance, atol=tolerance)
    assert_close(layer.inverse(z)[0], x, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("grad", [True, False])
def test_the_second_batch_costs_no_factorisation(layer_and_x, factorisations, grad):
    layer, x = layer_and_x
    with torch.set_grad_enabled(grad):
        layer(x)
        assert len(factorisations) == 1
        layer(torch.randn_like(x))
        layer(torch.randn_like(x)[:1])
        assert len(factorisations) == 1
        z, _ = layer(x)
        layer.inverse(z)  # needs the factors, which a log-determinant does not keep
        assert len(factorisations) == 2
        layer.inverse(z)
        layer(x)
        assert len(factorisations) == 2


def test_factors_are_kept_in_eval_mode_only(layer_and_x, factorisations):
    layer, x = layer_and_x
    layer.train()
    layer.inverse(x)
    layer.inverse(x)
    assert len(factorisations) == 2
    assert layer._factors._last.lu is None
    layer(x)
    assert len(factorisations) == 2  # the scalar is kept all the same


def test_log_prob_of_a_whole_flow_is_amortised(factorisations):
    flow = Flow(Chain(SelfNormConv2d(2, 3), SelfNormConv2d(2, 3), SelfNormConv2d(2, 1))).eval()
    factorisations.clear()
    for _ in range(3):
        flow.log_prob(torch.randn(5, 2, 4, 4))
    assert len(factorisations) == 3


def change_in_place(layer):
    with torch.no_grad():
        layer.weight.mul_(1.5)


def change_through_data(layer):
    layer.weight.data[0, 0] += 0.5


def change_through_numpy_like_alias(layer):
    layer.weight.detach().view(-1)[:2].add_(0.3)


def replace_data(layer):
    layer.weight.data = 1.5 * layer.weight.data


def replace_parameter(layer):
    layer.weight = torch.nn.Parameter(1.5 * layer.weight.detach())


def load_other_state(layer):
    state = copy.deepcopy(layer.state_dict())
    state["weight"] = 1.5 * state["weight"]
    layer.load_state_dict(state)


def optimiser_step(layer):
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.SGD([layer.weight], lr=0.05).step()
    layer.weight.grad = None


def to_float32(layer):
    layer.float()


def there_and_back(layer):
    layer.train()
    change_in_place(layer)
    layer.eval()


@pytest.mark.parametrize(
    "change",
    [
        change_in_place,
        change_through_data,
        change_through_numpy_like_alias,
        replace_data,
        replace_parameter,
        load_other_state,
        optimiser_step,
        to_float32,
        there_and_back,
    ],
    ids=lambda f: f.__name__,
)
def test_the_cache_is_never_stale(layer_and_x, change):
    layer, x = layer_and_x
    assert_exact(layer, x)
    change(layer)
    assert_exact(layer, x.to(layer.weight.dtype))
    layer.double()
    assert_exact(layer, x)


@pytest.mark.gpu
def test_the_cache_follows_a_move_to_another_device(layer_and_x):
    layer, x = layer_and_x
    layer, x = layer.cpu(), x.cpu()
    assert_exact(layer, x)
    layer.to(ACCELERATOR)
    assert_exact(layer, x.to(ACCELERATOR))


def test_another_image_size(layer_and_x):
    layer, x = layer_and_x
    if x.dim() == 2:
        return
    assert_exact(layer, x)
    assert_exact(layer, torch.randn(2, x.shape[1], 6, 7, device=x.device))
    assert_exact(layer, x)


def test_deepcopy_does_not_share_the_cache(layer_and_x):
    layer, x = layer_and_x
    layer(x)
    other = copy.deepcopy(layer)
    change_in_place(other)
    assert_exact(other, x)
    assert_exact(layer, x)


@pytest.mark.gpu
def test_the_cache_survives_a_replayed_graph(device):
    if device.type != "cuda":
        pytest.skip("CUDA graphs")
    layer, x = SelfNormLinear(6).to(device).eval(), torch.randn(3, 6, device=device)
    assert_exact(layer, x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        layer.weight.mul_(1.5)
    assert_exact(layer, x)
    graph.replay()
    assert_exact(layer, x)


def test_the_exact_path_gives_the_weight_its_gradient(layer_and_x):
    layer, x = layer_and_x
    weights = torch.randn_like(x)
    for _ in range(2):  # the second time from the cache
        z, log_det = layer(x)
        ours = torch.autograd.grad((z * weights).sum() + log_det.sum(), layer.weight)
        assert_close(ours, torch.autograd.grad(exact_log_likelihood(layer, x, weights), layer.weight), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["forward", "inverse"])
def test_second_derivatives_of_the_exact_path(layer_and_x, method):
    """As for a gradient penalty: its gradient agrees with finite differences."""
    layer, x = layer_and_x

    def penalty(create_graph):
        out, log_det = getattr(layer, method)(x)
        (gradient,) = torch.autograd.grad((out**3).sum() + log_det.sum(), layer.weight, create_graph=create_graph)
        return gradient.square().sum()

    (ours,) = torch.autograd.grad(penalty(True), layer.weight)
    direction, step, values = torch.randn_like(layer.weight), 1e-6, []
    for sign in (1, -2):
        layer.weight.data.add_(sign * step * direction)
        values.append(penalty(False))
    assert_close((ours * direction).sum(), (values[0] - values[1]) / (2 * step), rtol=1e-5, atol=1e-5)


def test_what_inference_mode_kept_can_be_differentiated_later(layer_and_x):
    layer, x = layer_and_x
    with torch.inference_mode():
        z, _ = layer(x)
        layer.inverse(z)
    back, log_det = layer.inverse(z.clone())
    (back.sum() + log_det.sum()).backward()
    assert torch.isfinite(layer.weight.grad).all()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch's own forward mode
def test_forward_and_reverse_mode_agree_on_the_exact_path(layer_and_x):
    layer, x = layer_and_x
    z = layer(x)[0].detach()

    class Inverse(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, z):
            return self.layer.inverse(z)

    for module, at, name in ((layer, x, "weight"), (Inverse(), z, "layer.weight")):

        def outputs(weight, at, module=module, name=name):
            return torch.func.functional_call(module, {name: weight}, (at,))

        for argument in (0, 1):
            forward, reverse = (
                mode(outputs, argument)(layer.weight.detach(), at) for mode in (torch.func.jacfwd, torch.func.jacrev)
            )
            assert_close(forward, reverse)
            assert forward[0].abs().max() > 0.01


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_second_derivatives_by_forward_mode_are_right_or_refused(layer_and_x):
    layer, x = layer_and_x

    def log_det(weight):
        return torch.func.functional_call(layer, {"weight": weight}, (x,))[1].sum()

    weight, direction = layer.weight.detach(), torch.randn_like(layer.weight)

    def along(function):
        return lambda weight: torch.func.jvp(function, (weight,), (direction,))[1]

    gradient = torch.func.grad(log_det)
    expected = torch.func.grad(lambda weight: (gradient(weight) * direction).sum())(weight)
    assert_close(along(gradient)(weight), expected)
    with pytest.raises(RuntimeError, match="at most one level of forward mode"):
        along(along(log_det))(weight)


def test_what_is_first_computed_under_a_transform_serves_outside_it():
    """What is cached must not belong to the transform. No other test has layers of these sizes."""
    for features, first in (
        (23, torch.func.grad),
        (29, torch.func.jacfwd),
        (31, lambda f: torch.func.jacfwd(torch.func.grad(f))),
    ):
        layer, x = ExactLinear(features), torch.randn(2, features)

        def log_det(weight, layer=layer, x=x):
            return torch.func.functional_call(layer, {"weight": weight}, (x,))[1].sum()

        weight = layer.weight.detach()
        first(log_det)(weight)
        gradient = torch.func.grad(log_det)(weight)
        assert_close(torch.func.jacfwd(torch.func.grad(log_det))(weight), torch.func.hessian(log_det)(weight))
        assert_close(gradient, 2 * torch.linalg.inv(weight).mT)


def test_torch_func_transforms_work_on_the_exact_path(layer_and_x):
    layer, x = layer_and_x
    jacobian = torch.func.jacrev(lambda x: layer(x)[0])(x[:1]).reshape(x[0].numel(), -1)
    assert_close(torch.linalg.slogdet(jacobian).logabsdet, layer(x)[1][0])
    gradient = torch.func.grad(lambda w: torch.func.functional_call(layer, {"weight": w}, (x,))[1].sum())(layer.weight.detach())
    assert_close(gradient, torch.autograd.grad(layer(x)[1].sum(), layer.weight)[0])


def test_the_exact_twins_train_by_the_exact_gradient(device):
    for layer, x in (
        (ExactLinear(5), torch.randn(4, 5)),
        (ExactConv2d(2, 3), torch.randn(4, 2, 3, 4)),
        (Conv1x1(3), torch.randn(2, 3, 2, 2)),
    ):
        layer, x = layer.to(device), x.to(device)
        weights = torch.randn_like(x)
        z, log_det, reconstruction = layer.surrogate(x)
        assert reconstruction.shape == (len(x), 0)
        assert_close(log_det, layer(x)[1])
        ours = torch.autograd.grad((z * weights).sum() + log_det.sum(), layer.weight)
        assert_close(ours, torch.autograd.grad(exact_log_likelihood(layer, x, weights), layer.weight), rtol=1e-9, atol=1e-9)


def test_the_gradient_of_a_float32_layer_is_float32():
    layer, x = SelfNormLinear(4).float(), torch.randn(3, 4, dtype=torch.float32)
    layer(x)[1].sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert_close(layer.weight.grad, 3 * torch.linalg.inv(layer.weight.detach()).T)


def test_evaluation_log_dets_are_taken_in_float64():
    """In float32 the product of 300 pivots is off by far more than the rounding of the result."""
    torch.manual_seed(3)
    layer = ExactLinear(300).float()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(300, 300) / 10)
    expected = torch.linalg.slogdet(layer.weight.double()).logabsdet
    assert_close(layer(torch.randn(1, 300, dtype=torch.float32))[1], expected.float().expand(1), rtol=2e-7, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights_are_named(layer_and_x, value):
    layer, x = layer_and_x
    layer(x)
    layer.weight.data.view(-1)[0] = value
    for method in (layer.forward, layer.inverse):
        with pytest.raises(ValueError, match=rf"{type(layer).__name__}\(.*expected finite weights, got 1 non-finite of"):
            method(x)


def test_singular_weights_are_named(layer_and_x):
    layer, x = layer_and_x
    layer(x)
    with torch.no_grad():
        layer.weight.zero_()
    for method in (layer.forward, layer.inverse):
        with pytest.raises(
            SingularWeightError, match=rf"{type(layer).__name__}\(.*expected an invertible weight, got a singular"
        ):
            method(x)


@pytest.mark.parametrize("channels", [1, 2])
def test_circular_convolutions_that_kill_a_frequency_are_singular(channels):
    """A box blur of 3 on an axis of 6 has zeros in its spectrum; each is a separate block, and rounding hides it."""
    layer = ExactConv2d(channels, (1, 3), padding_mode="circular", groups=channels)
    torch.nn.init.constant_(layer.weight, 1 / 3)
    with pytest.raises(SingularWeightError, match="expected an invertible weight"):
        layer(torch.randn(2, channels, 1, 6))
    assert_exact(layer, torch.randn(2, channels, 1, 7))


@pytest.mark.parametrize("matrix", [[[1, 1], [0, 1e-20]], [[1e-20, 1e-20], [1, 2]], [[1, 1e17], [0, 1]], [[0, 1e-9], [1e9, 0]]])
def test_rows_and_columns_of_any_scale_are_not_singular(matrix):
    layer = ExactLinear(2, bias=False)
    layer.weight.data.copy_(torch.tensor(matrix))
    expected = math.log(abs(matrix[0][0] * matrix[1][1] - matrix[0][1] * matrix[1][0]))
    assert_close(layer(torch.randn(1, 2))[1].item(), expected)


@pytest.mark.parametrize("features", [3, 10, 40])
def test_singularity_is_told_from_bad_scaling(features):
    """30 random matrices of each sort: a dependent column, a dependent row, a product of lower rank; and badly scaled ones."""
    layer, x = ExactLinear(features), torch.randn(1, features)
    for seed in range(30):
        torch.manual_seed(seed)
        matrix = torch.randn(features, features)
        column, row = matrix.clone(), matrix.clone()
        column[:, 0] = matrix[:, 1:] @ torch.randn(features - 1)
        row[-1] = torch.randn(features - 1) @ matrix[:-1]
        product = torch.randn(features, features - 1) @ torch.randn(features - 1, features)
        for singular in (column, row, product):
            layer.weight.data.copy_(singular)
            with pytest.raises(SingularWeightError):
                layer(x)
        scales = 10.0 ** torch.linspace(-30, 30, features)
        for scaled in (scales[:, None] * matrix, matrix * scales, scales[:, None] * matrix * scales.flip(0)):
            layer.weight.data.copy_(scaled)
            layer(x)


def test_numerically_singular_weights_are_refused_but_badly_scaled_ones_are_not():
    layer, x = ExactLinear(40), torch.randn(2, 40)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(40, 40))
        layer.weight[:, 7] = layer.weight[:, 3] - 2 * layer.weight[:, 5]
    with pytest.raises(SingularWeightError, match="1 of 40 pivots vanish"):
        layer(x)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(10.0 ** torch.linspace(-30, 30, 40)))
    assert_exact(layer, x)
    assert isinstance(SingularWeightError("…"), ValueError)


def test_1x1_convolutions_are_factorised_as_small_matrices():
    assert isinstance(Conv1x1(3).block_form(torch.randn(1, 3, 8, 8)), PerPixel)
    assert isinstance(ExactConv2d(3, 1, padding_mode="circular").block_form(torch.randn(1, 3, 8, 8)), PerPixel)
    assert ExactConv2d(3, 3, padding_mode="circular").block_form(torch.randn(1, 3, 8, 8)) == Circular(
        (3, 8, 8), Geometry(padding_mode="circular")
    )
