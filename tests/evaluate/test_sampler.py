"""A Sampler draws the samples of Flow.sample, even if the weights change after its graph was captured."""

import contextlib
import copy

import pytest
import torch

from selfnorm import EmergingConv2d, ExactLinear, Flow, LULinear, Sampler, SelfNormLinear, SmoothLeakyReLU, StandardNormal
from selfnorm.evaluate import sampler as module
from selfnorm.models import conv_flow, fc_flow, glow
from selfnorm.runtime.graphs import capturing
from selfnorm.runtime.precision import precision
from support.sampling import check, small, twins

# Most tests change R at random.
pytestmark = pytest.mark.filterwarnings("ignore::selfnorm.InaccurateInverseWarning")


@pytest.mark.parametrize("inverse", ["auto", "learned"])
def test_the_second_call_captures_and_later_ones_replay(device, captures, inverse):
    mine, theirs = twins(device)
    sampler = Sampler(small(device), 5, inverse, mine)
    check(sampler, theirs, 1)
    assert not captures and not sampler.captured
    check(sampler, theirs, 3)
    assert len(captures) == 1 and sampler.captured
    first, second = sampler(), sampler()
    assert not torch.equal(first, second) and first.data_ptr() != second.data_ptr()


def test_weights_changed_in_place_are_seen(device, captures):
    mine, theirs = twins(device)
    flow = small(device)
    sampler = Sampler(flow, 3, inverse="learned", generator=mine)
    check(sampler, theirs)
    with torch.no_grad():
        for value in flow.parameters():
            value.add_(0.1 * torch.randn_like(value))
    check(sampler, theirs)
    flow.load_state_dict(small(device).state_dict())
    check(sampler, theirs)
    optimizer = torch.optim.SGD(flow.parameters(), lr=0.01)
    flow.surrogate(torch.randn(4, 6, device=device, dtype=torch.float32)).log_det.sum().backward()
    optimizer.step()
    check(sampler, theirs)
    assert len(captures) == 1


@torch.no_grad()
def test_moved_weights_are_captured_again(device, captures):
    mine, theirs = twins(device)
    flow = small(device)
    sampler = Sampler(flow, 3, inverse="learned", generator=mine)
    check(sampler, theirs)
    layer = flow.bijection[0]
    layer.weight_inv.data = torch.randn(6, 6, device=device, dtype=torch.float32)
    check(sampler, theirs)
    layer.weight_inv.data = layer.weight_inv.data.mT  # same memory, different layout
    check(sampler, theirs)
    layer.bias = torch.nn.Parameter(torch.randn_like(layer.bias))
    check(sampler, theirs)
    flow.bijection.add_module("1", SmoothLeakyReLU(0.5))
    flow.bijection.add_module("2", SelfNormLinear(6).to(layer.weight))
    check(sampler, theirs)
    assert len(captures) == 5


def test_a_different_dtype_is_captured_again(device, captures):
    mine, theirs = twins(device)
    flow = small(device)
    sampler = Sampler(flow, 3, inverse="learned", generator=mine)
    check(sampler, theirs)
    flow.double()
    check(sampler, theirs, tolerance=1e-12)
    flow.float()
    check(sampler, theirs)
    assert len(captures) == 3 and all(graph is not None for graph in captures)


def test_a_different_precision_or_latent_shape_is_captured_again(device, captures):
    mine, theirs = twins(device)
    flow = Flow(SmoothLeakyReLU()).to(device)
    sampler = Sampler(flow, 2, generator=mine)
    for shape in ((1, 4), (1, 3, 2)):
        flow.log_prob(torch.randn(shape, device=device))
        check(sampler, theirs)
    assert len(captures) == 2
    with precision("bf16"):
        check(sampler, theirs)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        check(sampler, theirs)
    assert len(captures) == 4


def test_samples_that_are_not_finite_raise_an_error(device, captures):
    flow = small(device)
    sampler = Sampler(flow, 3, "learned")
    for _ in range(3):
        sampler()
    with torch.no_grad():
        flow.bijection[2].weight_inv[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"expected a finite result, got 18 non-finite of 18 .*bijection\.2\.weight_inv"):
        sampler()
    with torch.no_grad():
        flow.bijection[2].weight_inv[0, 0] = 1.0
    assert torch.isfinite(sampler()).all() and len(captures) == 1


@pytest.mark.parametrize("inverse", ["exact", "refined"])
def test_inverses_that_wait_are_not_captured(device, captures, inverse):
    mine, theirs = twins(device)
    flow = Flow(SelfNormLinear(4), StandardNormal(4)).to(device, torch.float64)
    with torch.no_grad():
        flow.bijection.weight_inv.copy_(flow.bijection.weight.inverse())
    check(Sampler(flow, 2, inverse, mine), theirs)
    assert not captures


@pytest.mark.parametrize("n", [-1, True, 1.5, "3"])
def test_an_invalid_number_of_samples(n):
    with pytest.raises(ValueError, match=rf"Sampler: expected n to be a whole number of at least 0, got {n!r}"):
        Sampler(small("cpu"), n)


def test_invalid_arguments():
    with pytest.raises(ValueError, match=r"Sampler: expected inverse to be one of auto, learned, exact, refined, got 'fast'"):
        Sampler(small("cpu"), 1, "fast")
    with pytest.raises(ValueError, match=r"Sampler: expected a Flow, got Chain"):
        Sampler(small("cpu").bijection)
    with pytest.raises(ValueError, match=r"Sampler: expected generator to be a torch.Generator or None, got int"):
        Sampler(small("cpu"), generator=3)


def test_zero_samples_are_an_empty_batch(device, captures):
    sampler = Sampler(small(device), 0)
    for _ in range(3):
        assert sampler().shape == sampler.flow.sample(0).shape == (0, 6)
    assert not captures


def test_repr(device, captures):
    sampler = Sampler(small(device), 2)
    assert repr(sampler) == "Sampler(Flow, n=2, inverse='auto', captured=False)"
    sampler(), sampler()
    assert repr(sampler) == "Sampler(Flow, n=2, inverse='auto', captured=True)"


def test_running_out_of_memory_is_an_error(monkeypatch):
    def full(z):
        raise torch.OutOfMemoryError("CUDA out of memory")

    nothing = lambda *args, **options: contextlib.nullcontext()  # noqa: E731
    for name in ("CUDAGraph", "device", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, nothing)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(module, "error_on_sync", nothing)
    with pytest.raises(torch.OutOfMemoryError):
        module._capture_inverse(full, torch.zeros(2))


class Stream:
    def wait_stream(self, other):
        pass


@pytest.mark.gpu
def test_the_sync_debug_mode_is_restored():
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with module.error_on_sync():
            assert torch.cuda.get_sync_debug_mode() == 2
        assert torch.cuda.get_sync_debug_mode() == 1
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("inverse", ["auto", "learned"])
def test_calls_in_and_out_of_inference_mode(device, captures, inverse):
    mine, theirs = twins(device)
    sampler = Sampler(small(device), 2, inverse, mine)
    for _ in range(2):
        with torch.inference_mode():
            check(sampler, theirs, 2)
        check(sampler, theirs, 2)
    assert len(captures) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("linear", ["selfnorm", "tracked", "exact", "relative", "lu"])
def test_every_linear_kind_on_a_gpu(linear):
    flow = fc_flow((1, 4, 4), linear=linear, levels=256).float().cuda().eval()
    check_on_gpu(flow, torch.rand(2, 1, 4, 4, device="cuda", dtype=torch.float32) * 255, linear in ("selfnorm", "tracked", "lu"))


@pytest.mark.gpu
@pytest.mark.parametrize("conv", ["selfnorm", "tracked", "exact", "emerging", "exp"])
def test_every_convolution_on_a_gpu(conv):
    flow = conv_flow((1, 8, 8), blocks=2, layers_per_block=2, conv=conv, levels=256).float().cuda().eval()
    check_on_gpu(flow, torch.rand(2, 1, 8, 8, device="cuda", dtype=torch.float32) * 255, conv in ("selfnorm", "tracked"))


@pytest.mark.gpu
@pytest.mark.parametrize("mix", ["selfnorm", "tracked", "exact"])
def test_glow_on_a_gpu(mix):
    flow = glow((1, 8, 8), steps=2, hidden=8, mix=mix, levels=256).float().cuda().eval()
    check_on_gpu(flow, torch.rand(2, 1, 8, 8, device="cuda", dtype=torch.float32) * 255, mix != "exact")


def check_on_gpu(flow, x, capturable):
    flow.initialize(x)
    flow.log_prob(x)  # the inverse pass needs the shapes
    for n, inverse in ((1, "learned"), (3, "learned"), (3, "auto")):
        mine, theirs = twins("cuda")
        sampler = Sampler(flow, n, inverse, mine)
        check(sampler, theirs, tolerance=2e-3)  # of 256 levels; libraries may choose another algorithm on another stream
        assert sampler.captured == capturable
        with torch.no_grad():
            for value in flow.parameters():
                value.add_(1e-3 * torch.randn_like(value))
        check(sampler, theirs, tolerance=2e-3)
    before = torch.randn(3, device="cuda")
    assert not torch.equal(before, torch.randn(3, device="cuda"))  # the generator still works


@pytest.mark.gpu
def test_inverses_that_wait_for_a_gpu_are_not_captured():
    for layer, shape in ((ExactLinear(4), (4,)), (EmergingConv2d(2), (2, 4, 4))):
        flow = Flow(layer, StandardNormal(shape)).float().cuda().eval()
        mine, theirs = twins("cuda")
        sampler = Sampler(flow, 2, generator=mine)
        check(sampler, theirs)
        assert not sampler.captured


@pytest.mark.gpu
def test_a_flow_and_its_copy():
    flow = Flow(LULinear(4), StandardNormal(4)).float().cuda()
    other = copy.deepcopy(flow)
    with torch.no_grad():
        other.bijection.factors.mul_(1.5)
    for each in (flow, other, flow):
        mine, theirs = twins("cuda")
        check(Sampler(each, 2, inverse="learned", generator=mine), theirs)


@pytest.mark.gpu
def test_other_captures_take_no_memory_from_a_graph():
    """Not even the workspace of cuBLAS, which otherwise would be shared until another capture frees it."""
    flow = fc_flow(300).float().cuda().eval()
    mine, theirs = twins(torch.device("cuda"))
    sampler = Sampler(flow, 64, inverse="learned", generator=mine)
    check(sampler, theirs)
    a, out = torch.randn(700, 700, device="cuda", dtype=torch.float32), []
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            out.append(a @ a)
        graph.replay()
        held = torch.full((2**26,), torch.nan, device="cuda", dtype=torch.float32)  # overwrites all freed memory
        check(sampler, theirs)
        assert held.isnan().all()
    torch.testing.assert_close(out[0], a @ a)
