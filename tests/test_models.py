"""The builders: the paper's architectures, traced whole, without waiting for the device."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from selfnorm import (
    ActNorm,
    Affine,
    AffineCoupling,
    ConditionalAffine,
    ExactConv2d,
    ExactLinear,
    Flatten,
    Logit,
    SelfNormConv2d,
    SelfNormLinear,
    SmoothLeakyReLU,
    SplineActivation,
    Split,
    Squeeze,
)
from selfnorm.models import CONV, LINEAR, MIX, conv_flow, fc_flow, glow

BUILDERS = {
    "fc": lambda kind: (fc_flow((1, 4, 4), linear=kind, levels=256), 256 * torch.rand(5, 1, 4, 4)),
    "conv": lambda kind: (conv_flow((1, 8, 4), 2, 1, conv=kind, levels=256), 256 * torch.rand(5, 1, 8, 4)),
    "glow": lambda kind: (glow((1, 8, 4), steps_per_block=2, hidden=8, mix=kind, levels=256), 256 * torch.rand(5, 1, 8, 4)),
    "glow-3x3": lambda kind: (glow((1, 8, 4), steps_per_block=1, hidden=8, mix=kind, mix_kernel_size=3), torch.randn(5, 1, 8, 4)),
}


KINDS = {"fc": LINEAR, "conv": CONV, "glow": MIX, "glow-3x3": ("selfnorm", "exact")}


@pytest.fixture(params=[(name, kind) for name, kinds in KINDS.items() for kind in kinds], ids="-".join)
def flow_and_x(request, device):
    name, kind = request.param
    flow, x = BUILDERS[name](kind)
    flow, x = flow.to(device), x.to(device)
    flow.initialize(x)
    return flow, x


def loss_of(flow, x):
    surrogate = flow.surrogate(x)
    return -surrogate.log_det.mean() + surrogate.reconstruction.sum(1).mean()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's tracer uses what torch deprecates
def test_compiles_to_one_graph_with_its_backward(flow_and_x):
    flow, x = flow_and_x
    torch._dynamo.reset()
    expected = loss_of(flow, x)
    gradients = torch.autograd.grad(expected, list(flow.parameters()))
    compiled = torch.compile(lambda x: loss_of(flow, x), fullgraph=True, backend="aot_eager")
    loss = compiled(x)
    assert_close(loss, expected)
    assert_close(torch.autograd.grad(loss, list(flow.parameters())), gradients)


class NeverWaits(TorchDispatchMode):
    """Refuses every operation whose result the host would have to wait for."""

    WAITS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique", "allclose", "item")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.WAITS, f"{name} reads the device"
        return func(*args, **(kwargs or {}))


def test_a_surrogate_step_never_waits_on_the_device(flow_and_x):
    flow, x = flow_and_x
    with NeverWaits():
        loss_of(flow, x).backward()
    with pytest.raises(AssertionError, match="reads the device"), NeverWaits():
        flow.log_prob(x)  # the exact path may, and does: so the guard can fail


@pytest.mark.gpu
def test_a_surrogate_step_never_synchronises_with_cuda(flow_and_x, never_waiting):
    flow, x = flow_and_x
    if x.device.type != "cuda":
        pytest.skip("CUDA")
    loss_of(flow, x).backward()  # libraries set themselves up at the first call
    with never_waiting():
        loss_of(flow, x).backward()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "selfnorm") for name in BUILDERS),
        *(("fc", kind) for kind in ("tracked", "sketch", "relative", "lu")),
        *((name, "tracked") for name in ("conv", "glow")),
    ],
)
def test_a_training_step_can_be_captured_as_one_cuda_graph(name, kind, device):
    if device.type != "cuda":
        pytest.skip("CUDA")
    flow, x = BUILDERS[name](kind)
    flow, x = flow.to(device), x.to(device)
    flow.initialize(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            loss_of(flow, x).backward()
    torch.cuda.current_stream().wait_stream(side)
    expected = torch.autograd.grad(loss_of(flow, x), list(flow.parameters()))
    flow.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss_of(flow, x).backward()
    graph.replay()
    torch.cuda.synchronize()
    assert_close([p.grad for p in flow.parameters()], list(expected), rtol=1e-8, atol=1e-8)


def test_trains_and_scores_under_autocast(flow_and_x):
    """Only coupling networks go to half precision; log-dets stay in float32."""
    flow, x = flow_and_x
    flow, x = flow.float(), x.float()
    expected = flow.log_prob(x)
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = loss_of(flow, x)
        log_prob = flow.log_prob(x)
    assert loss.dtype == log_prob.dtype == torch.float32
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in flow.parameters())
    assert_close(log_prob, expected, rtol=1e-2, atol=1e-2)


def test_the_model_moves_between_dtypes_and_devices(flow_and_x):
    flow, x = flow_and_x
    expected = flow.log_prob(x)
    flow.float()
    single = flow.log_prob(x.float())
    assert single.dtype == torch.float32
    assert_close(single.double(), expected, rtol=1e-4, atol=1e-2)


def kinds(chain):
    return [type(layer) for layer in chain]


def test_fc_flow_is_the_papers():
    flow = fc_flow((1, 28, 28), levels=256)
    assert kinds(flow.bijection) == [Affine, Logit, Flatten, SelfNormLinear, SmoothLeakyReLU, SelfNormLinear]
    assert flow.bijection[3].weight.shape == (784, 784) and flow.bijection[4].alpha == 0.3
    assert flow.reconstruction_names == ("3", "5")


def test_conv_flow_is_the_papers():
    flow = conv_flow((1, 28, 28))
    step = [SelfNormConv2d, SplineActivation]
    assert kinds(flow.bijection) == [*step * 3, Squeeze, *step * 3, Squeeze, *step * 2, SelfNormConv2d]
    convs = [layer for layer in flow.bijection if isinstance(layer, SelfNormConv2d)]
    assert [c.channels for c in convs] == [1, 1, 1, 4, 4, 4, 16, 16, 16]
    assert all(c.kernel_size == c.inverse_kernel_size == (3, 3) for c in convs)
    splines = [layer for layer in flow.bijection if isinstance(layer, SplineActivation)]
    assert {s.shape for s in splines} == {(1, 28, 28), (4, 14, 14), (16, 7, 7)}
    assert flow.sample(1).shape == (1, 1, 28, 28)


def test_glow_is_the_papers():
    flow = glow((1, 28, 28))
    step = [ActNorm, SelfNormConv2d, AffineCoupling]
    assert kinds(flow.bijection) == [Squeeze, *step * 16, Split]
    split = flow.bijection[-1]
    assert kinds(split.rest) == [Squeeze, *step * 16, Flatten] and isinstance(split.prior, ConditionalAffine)
    assert flow.bijection[2].weight.shape == (4, 4, 1, 1) and split.rest[2].weight.shape == (8, 8, 1, 1)
    assert len(flow.reconstruction_names) == 32 and flow.reconstruction_names[-1] == "49.rest.47"
    assert flow.bijection[3].affine.network[2].weight.shape == (512, 512, 1, 1)


def test_cifar_glow_has_the_papers_channels():
    flow = glow((3, 32, 32), blocks=3, steps_per_block=1, hidden=4)
    channels = [m.channels for m in flow.modules() if isinstance(m, ActNorm)]
    assert channels == [12, 24, 48]
    assert flow.base.extra_repr() == "(3072,)"


def test_glow_takes_its_steps_by_their_old_name():
    old, new = (glow((1, 4, 4), blocks=1, hidden=4, **option) for option in ({"steps": 3}, {"steps_per_block": 3}))
    assert kinds(old.bijection) == kinds(new.bijection) == [Squeeze, *[ActNorm, SelfNormConv2d, AffineCoupling] * 3, Flatten]
    with pytest.raises(TypeError, match="glow: expected steps_per_block once"):
        glow((1, 4, 4), steps=3, steps_per_block=3)


def test_exact_kinds():
    assert isinstance(fc_flow(3, linear="exact").bijection[1], ExactLinear)
    assert isinstance(conv_flow((1, 4, 4), conv="exact").bijection[0], ExactConv2d)
    for kernel_size in (1, 5):
        mix = glow((1, 4, 4), steps_per_block=1, hidden=4, mix="exact", mix_kernel_size=kernel_size).bijection[2]
        assert isinstance(mix, ExactConv2d) and mix.kernel_size == (kernel_size, kernel_size)


@pytest.mark.parametrize("build", [fc_flow, conv_flow, glow])
def test_a_trained_flow_loads_into_its_exact_twin_and_back(build):
    keyword = {"fc_flow": "linear", "conv_flow": "conv", "glow": "mix"}[build.__name__]
    options = {"steps_per_block": 1, "hidden": 4} if build is glow else {}
    selfnorm, exact = (build((1, 4, 4), **{keyword: kind}, **options) for kind in ("selfnorm", "exact"))
    x = torch.randn(3, 1, 4, 4)
    exact.load_state_dict(selfnorm.state_dict())
    assert_close(exact.log_prob(x), selfnorm.log_prob(x))
    other = build((1, 4, 4), **options)
    other.load_state_dict(exact.state_dict())
    assert_close(other.log_prob(x), selfnorm.log_prob(x))


def test_kernel_sizes_reach_the_layers():
    for conv in ("selfnorm", "exact"):
        assert conv_flow((1, 8, 8), kernel_size=(1, 5), conv=conv).bijection[0].weight.shape == (1, 1, 1, 5)
        assert glow((1, 4, 4), steps_per_block=1, hidden=4, mix=conv, mix_kernel_size=5).bijection[2].weight.shape == (4, 4, 5, 5)


def test_initialize_reaches_every_actnorm():
    flow, x = glow((1, 8, 8), blocks=3, steps_per_block=2, hidden=4), 3 * torch.randn(64, 1, 8, 8) + 1
    flow.initialize(x)
    assert all(m.initialized for m in flow.modules() if isinstance(m, ActNorm))
    z = flow.bijection[:2](x)[0].transpose(0, 1).flatten(1)
    assert_close(z.mean(1), torch.zeros(4), rtol=0, atol=1e-8)
    assert_close(z.std(1, correction=0), torch.ones(4), rtol=1e-5, atol=0)


def test_asymmetric_conv_flow():
    flow = conv_flow((1, 8, 8), inverse_kernel_size=7)
    assert flow.bijection[0].weight_inv.shape == (1, 1, 7, 7)
    with pytest.raises(ValueError, match="expected no inverse_kernel_size with conv='exact'"):
        conv_flow((1, 8, 8), inverse_kernel_size=7, conv="exact")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: fc_flow(4, linear="magic"), "expected linear to be one of selfnorm, exact, tracked, sketch, relative, lu, got"),
        (lambda: conv_flow((1, 8, 8), conv="magic"), "conv_flow: expected conv to be one of"),
        (lambda: glow((1, 8, 8), mix="magic"), "glow: expected mix to be one of"),
        (lambda: conv_flow((1, 6, 8)), r"expected a shape \(C, H, W\) with H and W divisible by 4, got \(1, 6, 8\)"),
        (lambda: glow((1, 28, 28), blocks=3), "divisible by 8"),
        (lambda: glow((28, 28)), r"expected a shape \(C, H, W\)"),
        (lambda: fc_flow(0), "at least 1"),
        (lambda: fc_flow(4, layers=0), "fc_flow: expected layers to be a whole number of at least 1, got 0"),
        (lambda: glow((1, 4, 4), steps_per_block=0), "glow: expected steps_per_block"),
        (lambda: fc_flow(4, levels=0), "fc_flow: expected levels"),
        (lambda: fc_flow(4, alpha=0), "SmoothLeakyReLU: expected alpha in"),
    ],
)
def test_what_the_builders_refuse(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_training_by_the_surrogate_reaches_the_exact_twins_likelihood():
    """300 steps of Adam on correlated, skewed 2-D data: both end at the same exact likelihood, and the learned inverse is one."""
    torch.manual_seed(2)
    raw = torch.randn(2000, 2)
    data = torch.stack([raw[:, 0], 0.6 * raw[:, 0] + 0.3 * raw[:, 1].exp()], dim=1)
    scores = {}
    for kind in ("selfnorm", "exact"):
        torch.manual_seed(0)
        flow = fc_flow(2, linear=kind)
        optimizer = torch.optim.Adam(flow.parameters(), lr=0.02)
        for _ in range(300):
            optimizer.zero_grad()
            surrogate = flow.surrogate(data)
            (-surrogate.log_det.mean() + 10 * surrogate.reconstruction.sum(1).mean()).backward()
            optimizer.step()
            flow.after_step()
        scores[kind] = flow.log_prob(data).mean().item()
        if kind == "selfnorm":
            start = fc_flow(2).log_prob(data).mean().item()
            assert flow.surrogate(data).reconstruction.mean() < 0.01
    assert scores["exact"] > start + 0.5
    assert abs(scores["selfnorm"] - scores["exact"]) < 0.05
