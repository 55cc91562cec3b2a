"""Where the paper's objective loses its optimum, and that the one-sided one keeps it (docs/stability.md).

The Jacobian of the gradient field is taken through the library's own loss and layers.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from selfnorm import Chain, Flow, SelfNormConv2d, SelfNormLinear, SmoothLeakyReLU
from selfnorm.objective import Loss
from support.gradient_field import growth, independent, jacobian, velocity

pytestmark = pytest.mark.filterwarnings("ignore::selfnorm.objective.UnstableObjectiveWarning")
MARGIN = 1e-3  # relative distance from the bound at which the sign must be right


class Quadratic(nn.Module):
    """Log-density −½zᵀCz − tᵢᵀz of example i, up to a constant: a part of a flow with constant curvature C behind the layer."""

    def __init__(self, curvature, tilt=0.0):
        super().__init__()
        self.curvature, self.tilt = curvature, tilt

    def log_prob(self, z):
        return -((z @ self.curvature / 2 + self.tilt) * z).sum(1)

    def sample(self, n, generator=None):
        raise NotImplementedError


class HeavyTailed(Quadratic):
    """The Cauchy density, whose curvature is negative in the tails."""

    def __init__(self):
        super().__init__(None)

    def log_prob(self, z):
        return -torch.log1p(z.square()).sum(1)


def symmetric_power(matrix, power):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values[..., None, :] ** power @ vectors.mH


def positive(dimensions, condition=10.0):
    """Returns a random symmetric matrix whose eigenvalues lie between 1/√condition and √condition, with both ends attained."""
    rotation = torch.linalg.qr(torch.randn(dimensions, dimensions)).Q
    exponents = torch.rand(dimensions) - 0.5
    exponents[0], exponents[-1] = 0.5, -0.5
    return rotation * condition**exponents @ rotation.mT


def batch_with_second_moment(S, n=12):
    """Returns (n, D) with XᵀX/n = S exactly. Its rows have a mean, which counts: S is not a covariance."""
    rows = torch.linalg.qr(torch.randn(n, len(S))).Q
    return math.sqrt(n) * rows @ symmetric_power(S, 0.5)


def rotations(W, curvature):
    """Returns the D(D−1)/2 directions (dW, dR) along which the likelihood of a Gaussian part behind the layer is constant."""
    D, root = len(W), symmetric_power(curvature, 0.5)
    found = []
    for i in range(D):
        for j in range(i):
            A = torch.zeros(D, D)
            A[i, j], A[j, i] = 1, -1
            A = torch.linalg.solve(root, A @ root)
            found.append(torch.cat([(A @ W).flatten(), (-torch.linalg.solve(W, A)).flatten()]))
    return torch.stack(found, 1) if found else torch.zeros(2 * D * D, 0)


def linear_loss(W, base, reconstruction_weight, inverse_likelihood):
    """Returns the loss of a linear layer W with R = W⁻¹, in front of a base distribution."""
    layer = SelfNormLinear(len(W), bias=False)
    with torch.no_grad():
        layer.weight.copy_(W)
        layer.weight_inv.copy_(torch.linalg.inv(W))
    return Loss(Flow(Chain(layer), base), reconstruction_weight, inverse_likelihood=inverse_likelihood)


def linear_case(dimensions, behind, condition=10.0):
    """Returns S, a batch with it, W, the base in front of which W is optimal, and the neutral directions."""
    S = positive(dimensions, condition)
    x = batch_with_second_moment(S)
    rotation = torch.linalg.qr(torch.randn(dimensions, dimensions)).Q
    if behind == "whitening":
        W, C = rotation @ symmetric_power(S, -0.5), torch.eye(dimensions)
        return S, x, W, None, rotations(W, C)
    C = positive(dimensions, condition)
    W = symmetric_power(C, -0.5) @ rotation @ symmetric_power(S, -0.5)  # any W with C W S = W⁻ᵀ
    if behind == "Gaussian":
        return S, x, W, Quadratic(C), rotations(W, C)
    C = C + positive(dimensions)  # more curved than a Gaussian: nothing is neutral
    tilt = x @ torch.linalg.solve(S, torch.linalg.inv(W) - S @ W.mT @ C)
    return S, x, W, Quadratic(C, tilt), None


def bound_of(S):
    """Returns the λ below which the paper's objective is unstable."""
    return 1 / (8 * float(torch.linalg.eigvalsh(S)[..., 0].min()))


def growths_around(bound, loss_of, x, neutral=None):
    """Returns the growth just above a λ and just below it."""
    return [growth(loss_of(bound * (1 + side * MARGIN)), x, neutral) for side in (1, -1)]


@pytest.mark.parametrize("behind", ["whitening", "Gaussian", "curved"])
@pytest.mark.parametrize("dimensions", [1, 2, 5])
def test_bound_of_the_paper(dimensions, behind):
    S, x, W, base, neutral = linear_case(dimensions, behind)
    assert torch.allclose(x.mT @ x / len(x), S)
    assert neutral is None or neutral.shape[1] == dimensions * (dimensions - 1) // 2
    resting = linear_loss(W, base, 1.0, True)
    assert velocity(resting, x, [*resting.parameters()]).abs().max() < 1e-12
    above, below = growths_around(bound_of(S), lambda weight: linear_loss(W, base, weight, True), x, neutral)
    assert above < 0 < below


def test_mean_counts():
    """An input that never varies, but is not zero, holds its R: the bound is in raw second moments."""
    x, W = torch.ones(4, 1), torch.ones(1, 1)
    above, below = growths_around(1 / 8, lambda weight: linear_loss(W, None, weight, True), x)
    assert above < 0 < below


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_determinant_of_the_paper(dimensions):
    """Theorem 1, with its constant: the determinant for a curvature that leaves nothing neutral."""
    S, x, W, base, _ = linear_case(dimensions, "curved")
    K = W.mT @ base.curvature @ W
    transposition = torch.eye(dimensions**2).view(dimensions, dimensions, -1).transpose(0, 1).reshape(dimensions**2, -1)
    hessian = torch.kron(K, S) + transposition
    s = torch.linalg.eigvalsh(S)
    for weight in (0.01, 0.3, 4.0):
        pairs = torch.triu_indices(dimensions, dimensions, 1)
        factors = [4 * weight * s - 0.5, 16 * weight**2 * s[pairs[0]] * s[pairs[1]] - 0.25]
        expected = torch.linalg.det(hessian / 2) * torch.cat(factors).prod()
        torch.testing.assert_close(torch.linalg.det(jacobian(linear_loss(W, base, weight, True), x)), expected, rtol=1e-5, atol=0)


def test_bound_with_a_bias_and_a_mean():
    """The bias trains, too, so that the rest of the flow sees the covariance, while the penalty sees the second moment."""
    covariance, mean = positive(2), torch.tensor([0.7, -0.4])
    rows = torch.randn(12, 2)
    rows = torch.linalg.qr(rows - rows.mean(0)).Q * math.sqrt(12)
    x = rows @ symmetric_power(covariance, 0.5) + mean
    S, W = x.mT @ x / len(x), symmetric_power(covariance, -0.5)
    torch.testing.assert_close(S, covariance + torch.outer(mean, mean))

    def loss_of(weight, inverse_likelihood=True):
        layer = SelfNormLinear(2)
        with torch.no_grad():
            for parameter, value in zip(layer.parameters(), (W, -W @ mean, torch.linalg.inv(W)), strict=True):
                parameter.copy_(value)
        return Loss(Flow(Chain(layer)), weight, inverse_likelihood=inverse_likelihood)

    resting = loss_of(1.0)
    assert [name.split(".")[-1] for name, _ in resting.named_parameters()] == ["weight", "bias", "weight_inv"]
    assert velocity(resting, x, [*resting.parameters()]).abs().max() < 1e-12
    A = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])  # rotates z
    neutral = torch.cat([(A @ W).flatten(), -A @ W @ mean, -torch.linalg.solve(W, A).flatten()])[:, None]
    above, below = growths_around(bound_of(S), loss_of, x, neutral)
    assert above < 0 < below
    for weight in (1e-2, 1e2):
        assert growth(loss_of(weight, inverse_likelihood=False), x, neutral) < 0


def kernel_of(symbols):
    """Returns the real kernel (C, C, k, k) of a circular convolution on k × k images, k odd, from its symbols (k, k, C, C)."""
    taps = torch.fft.fft2(symbols, dim=(0, 1)) / symbols[..., 0, 0].numel()
    assert taps.imag.abs().max() < 1e-12
    centre = symbols.shape[0] // 2
    return torch.roll(taps.real, (centre, centre), (0, 1)).permute(2, 3, 0, 1).contiguous()


def symbols_of(kernel):
    """Returns the symbols (k, k, C, C) by which a circular convolution multiplies Fourier coefficients."""
    centre = kernel.shape[2] // 2
    taps = torch.roll(kernel.permute(2, 3, 0, 1), (-centre, -centre), (0, 1))
    return torch.fft.ifft2(taps, dim=(0, 1)) * taps[..., 0, 0].numel()


@pytest.mark.parametrize(("channels", "free"), [(1, 4), (2, 17)])
def test_bound_of_a_circular_convolution(channels, free):
    """The bound holds for the smallest eigenvalue of S(ω) = E[ĥĥ*] over all frequencies, whatever the other correlations are."""
    x = torch.randn(20, channels, 3, 3) * torch.linspace(0.5, 2, 9).view(3, 3)
    spectrum = torch.fft.fft2(x, norm="ortho").permute(2, 3, 0, 1)  # (3, 3, N, C)
    S = torch.einsum("hwnc,hwnd->hwcd", spectrum, spectrum.conj()) / len(x)
    w, r = (symmetric_power(S, power) for power in (-0.5, 0.5))

    def loss_of(weight, inverse_likelihood=True):
        layer = SelfNormConv2d(channels, 3, padding_mode="circular", bias=False)
        with torch.no_grad():
            layer.weight.copy_(kernel_of(w))
            layer.weight_inv.copy_(kernel_of(r))
        return Loss(Flow(Chain(layer)), weight, inverse_likelihood=inverse_likelihood)

    directions = []
    for basis in torch.eye(channels * channels * 9).view(-1, channels, channels, 3, 3):
        A = symbols_of(basis)
        A = A - A.mH
        directions.append(torch.cat([kernel_of(A @ w).flatten(), -kernel_of(r @ A).flatten()]))
    neutral = independent(torch.stack(directions, 1))
    assert neutral.shape[1] == free
    resting = loss_of(1.0)
    assert velocity(resting, x, [*resting.parameters()]).abs().max() < 1e-12
    above, below = growths_around(bound_of(S), loss_of, x, neutral)
    assert above < 0 < below
    for weight in (1e-2, 1e2):
        assert growth(loss_of(weight, inverse_likelihood=False), x, neutral) < 0


def optimal_flow():
    """Returns data, and a flow of two linear layers with an activation between them at an optimum of its exact likelihood.

    The data are drawn from such a flow, and the search for the optimum for this batch starts at its weights.
    """
    activation, z = SmoothLeakyReLU(), torch.randn(200, 2)
    start = [torch.tensor([[2.0, 0.5], [-0.4, 1.2]]), torch.tensor([0.3, -0.5]), torch.tensor([[0.4, -0.2], [0.3, 0.4]])]
    x = (activation.inverse(torch.linalg.solve(start[2], z.mT).mT)[0] - start[1]) @ torch.linalg.inv(start[0]).mT
    alpha = activation.alpha

    def unpack(point):
        return [part.view(shape) for part, shape in zip(point.split([4, 2, 4, 2]), [(2, 2), (2,)] * 2, strict=True)]

    def nll(point):
        W1, b1, W2, b2 = unpack(point)
        u = x @ W1.mT + b1
        z = (alpha * u + (1 - alpha) * F.softplus(u)) @ W2.mT + b2
        slopes = torch.log(alpha + (1 - alpha) * torch.sigmoid(u)).sum(1)
        return (z.square().sum(1) / 2 - slopes).mean() - torch.linalg.slogdet(W1)[1] - torch.linalg.slogdet(W2)[1]

    point = torch.cat([part.flatten() for part in (*start, torch.zeros(2))]).requires_grad_()
    optimizer = torch.optim.LBFGS([point], max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        value = nll(point)
        value.backward()
        return value

    optimizer.step(closure)
    point = point.detach()
    for _ in range(5):
        hessian, gradient = (getattr(torch.autograd.functional, name)(nll, point) for name in ("hessian", "jacobian"))
        point = point - torch.linalg.pinv(hessian, rtol=1e-9) @ gradient
    assert gradient.abs().max() < 1e-10
    curvatures = torch.linalg.eigvalsh(hessian)
    assert abs(curvatures[0]) < 1e-9 and curvatures[1] > 1e-4  # a minimum, but for the rotation of z
    return x, *unpack(point)


def whole_flow():
    """Returns data, the loss of their optimal flow by settings, its neutral direction, and the moments of both inputs."""
    x, W1, b1, W2, b2 = optimal_flow()
    h = SmoothLeakyReLU()(x @ W1.mT + b1)[0]

    def loss_of(weight, inverse_likelihood=True, trains=(True, True)):
        layers = SelfNormLinear(2), SelfNormLinear(2)
        for layer, W, b, trained in zip(layers, (W1, W2), (b1, b2), trains, strict=True):
            with torch.no_grad():
                layer.weight.copy_(W)
                layer.weight_inv.copy_(torch.linalg.inv(W))
                layer.bias.copy_(b)
            layer.requires_grad_(trained)
        return Loss(Flow(Chain(layers[0], SmoothLeakyReLU(), layers[1])), weight, inverse_likelihood=inverse_likelihood)

    A = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])  # rotates z
    moving = {"2.weight": A @ W2, "2.weight_inv": -torch.linalg.solve(W2, A), "2.bias": A @ b2}

    def neutral_of(loss):
        named = [(name[-len("2.weight_inv") :], p) for name, p in loss.flow.bijection.named_parameters() if p.requires_grad]
        found = torch.cat([moving.get(name, torch.zeros_like(p)).flatten() for name, p in named]).detach()[:, None]
        return found if found.any() else None

    moments = torch.stack([batch.mT @ batch / len(batch) for batch in (x, h)])
    return x, loss_of, neutral_of, moments


@pytest.mark.parametrize("layer", [0, 1])
def test_bound_of_a_hidden_layer(layer):
    """One layer of a flow with an activation trains, with its bias; the curvature behind the first is not constant."""
    x, loss_of, neutral_of, moments = whole_flow()
    trains = (layer == 0, layer == 1)
    neutral = neutral_of(loss_of(1.0, trains=trains))
    above, below = growths_around(bound_of(moments[layer]), lambda weight: loss_of(weight, trains=trains), x, neutral)
    assert above < 0 < below
    for weight in (1e-2, 1.0, 1e2):
        assert growth(loss_of(weight, False, trains), x, neutral) < 0


def test_bound_of_a_whole_flow():
    """If all layers train, the determinant of the Jacobian has the sign of the factors of theorem 1 of all layers together.

    So it changes at every layer's bound. That is all: two growing modes leave the determinant positive, and small λ can have them
    in either objective.
    """
    x, loss_of, neutral_of, moments = whole_flow()
    neutral = neutral_of(loss_of(1.0))
    rest = torch.linalg.qr(neutral, mode="complete").Q[:, 1:]

    def sign(weight, inverse_likelihood=True):
        return int(torch.linalg.slogdet(rest.mT @ -jacobian(loss_of(weight, inverse_likelihood), x) @ rest).sign)

    def expected(weight):
        first, second = torch.linalg.eigvalsh(moments).mT * weight
        factors = torch.cat([4 * first - 0.5, 4 * second - 0.5, 16 * first * second - 0.25])
        return int(factors.prod().sign())

    bounds = [bound_of(S) for S in moments]
    for weight in max(bounds) * torch.logspace(-2.5, 1, 24):
        assert sign(float(weight)) == expected(float(weight))
    for bound in bounds:
        assert sign(bound * (1 + MARGIN)) == -sign(bound * (1 - MARGIN))
    assert sign(10 * max(bounds)) == sign(1.01 * max(bounds)) == 1
    assert all(sign(factor * max(bounds), inverse_likelihood=False) == 1 for factor in (0.1, 0.5, 1, 10))
    for inverse_likelihood in (True, False):
        assert growth(loss_of(4 * max(bounds), inverse_likelihood), x, neutral) < 0
        assert growth(loss_of(1.01 * max(bounds), inverse_likelihood), x, neutral) > 0


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize(("inverse_likelihood", "bound"), [(True, 1 / 8), (False, 1 / 4)])
def test_bound_of_a_stack(depth, inverse_likelihood, bound):
    """Linear layers in a row, W = I, on white data: what one gains and the next loses is not curved."""
    D, x = 2, batch_with_second_moment(torch.eye(2))

    def loss_of(weight):
        layers = [SelfNormLinear(D, bias=False) for _ in range(depth)]
        with torch.no_grad():
            for parameter in (parameter for layer in layers for parameter in layer.parameters()):
                parameter.copy_(torch.eye(D))
        return Loss(Flow(Chain(*layers)), weight, inverse_likelihood=inverse_likelihood)

    directions = []
    for basis in torch.eye(D * D).view(-1, D, D):
        both = torch.cat([basis.flatten(), -basis.flatten()])  # dW and dR
        for k in range(depth - 1):
            directions.append(torch.cat([(1.0 if j == k else -1.0 if j == k + 1 else 0.0) * both for j in range(depth)]))
        rotation = (basis - basis.mT).flatten()
        directions.append(torch.cat([rotation, -rotation, torch.zeros(2 * D * D * (depth - 1))]))
    neutral = independent(torch.stack(directions, 1))
    assert neutral.shape[1] == (depth - 1) * D * D + D * (D - 1) // 2
    above, below = growths_around(bound, loss_of, x, neutral)
    assert above < 0 < below


def test_one_sided_objective_is_stable():
    """At any λ, S and W; the paper's objective is not, in the same cases."""
    unstable = 0
    for case in range(24):
        dimensions, behind = 1 + case % 4, ("whitening", "Gaussian", "curved")[case % 3]
        _, x, W, base, neutral = linear_case(dimensions, behind, condition=(10.0, 1e2, 1e4)[case // 3 % 3])
        weight = 10 ** (6 * float(torch.rand(())) - 3)
        assert growth(linear_loss(W, base, weight, False), x, neutral) < 0
        unstable += growth(linear_loss(W, base, weight, True), x, neutral) > 0
    assert 4 < unstable < 20


def test_heavy_tails_need_a_larger_weight():
    """Without curvature behind it, only the penalty holds W: D = 1 is stable at every w if and only if 2λS + E[ℓ″z²] ≥ 0."""
    z = torch.tan(torch.linspace(-1, 1, 9) * 1.5)[:, None]
    for _ in range(50):  # E[ℓ′z] = 1
        z = z * (z.square() / (1 + z.square())).mean().mul(2).pow(-1)
    curvature = float((2 * z.square() * (1 - z.square()) / (1 + z.square()).square()).mean())
    W = torch.full((1, 1), 0.01)
    x = z / W
    S = float(x.square().mean())
    assert -1 < curvature < -0.1
    for inverse_likelihood, least in ((False, -curvature), (True, -curvature / 2)):
        signs = [
            growth(linear_loss(W, HeavyTailed(), side * least / (2 * S), inverse_likelihood), x) > 0 for side in (0.98, 1.02)
        ]
        assert signs == ([True, False] if least > 1 / 4 else [True, True])


def turned(angle, first, second):
    rotation = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    return rotation * torch.tensor([first, second]) @ rotation.mT


def test_little_curvature_can_be_unstable():
    """The guarantee needs at least the curvature of a Gaussian: less of it, at a strict minimum of the NLL, can be unstable."""
    # Found by a search for the least stable case, then rounded.
    S, gram, K = turned(-1.42, 0.039, 13.0), turned(-2.93, 0.019, 27.0), turned(-2.31, 0.042, 54.0)  # gram = WᵀW, K = WᵀCW
    W, x = symmetric_power(gram, 0.5), batch_with_second_moment(S)
    C = torch.linalg.solve(W, torch.linalg.solve(W, K).mT)
    base = Quadratic(C, x @ torch.linalg.solve(S, torch.linalg.inv(W) - S @ W.mT @ C))
    transposition = torch.eye(4).view(2, 2, 2, 2).transpose(0, 1).reshape(4, 4)
    assert torch.linalg.eigvalsh(torch.kron(K, S) + transposition)[0] > 0.01
    assert growth(linear_loss(W, base, 0.003, False), x) > 0.01
    assert growth(linear_loss(W, base, 1.0, False), x) < 0


def inverse_error(W, R):
    return float((R.detach() @ W.detach() - torch.eye(len(W))).norm())


@pytest.mark.parametrize(
    ("relative", "inverse_likelihood", "holds"), [(1.3, True, True), (0.6, True, False), (0.6, False, True), (0.1, False, True)]
)
def test_descent_near_the_bound(relative, inverse_likelihood, holds):
    """Gradient descent from a small error of R: it decays where the Jacobian says so, and grows where it does not."""
    S, x, W, base, _ = linear_case(2, "whitening")
    loss = linear_loss(W, base, relative * bound_of(S), inverse_likelihood)
    W, R = loss.flow.bijection[0].weight, loss.flow.bijection[0].weight_inv
    with torch.no_grad():
        R += 1e-3 * torch.randn(2, 2)
    before = inverse_error(W, R)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.06)
    for _ in range(600):
        optimizer.zero_grad()
        loss(x)[0].backward()
        optimizer.step()
    after = inverse_error(W, R)
    assert after < 1e-2 * before if holds else after > 30 * before
