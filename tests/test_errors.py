"""Bad input: each a ValueError that says which layer, what was expected and what came."""

import numpy as np
import pytest
import torch

from selfnorm import (
    ActNorm,
    Affine,
    AffineCoupling,
    Conv1x1,
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
from selfnorm.models import fc_flow, glow

REFUSED = {
    "even kernel": (lambda: SelfNormConv2d(2, 4), r"SelfNormConv2d: expected odd sides for kernel_size, got 4"),
    "even side": (lambda: ExactConv2d(2, (3, 2)), r"ExactConv2d: expected odd sides for kernel_size, got \(3, 2\)"),
    "even inverse": (lambda: SelfNormConv2d(2, 3, 6), r"SelfNormConv2d: expected odd sides for inverse_kernel_size, got 6"),
    "no kernel": (lambda: SelfNormConv2d(2, 0), r"SelfNormConv2d: expected kernel_size .*at least 1, got 0"),
    "a bool": (lambda: SelfNormLinear(True), r"SelfNormLinear: expected features .*at least 1, got True"),
    "stride": (lambda: SelfNormConv2d(2, 3, stride=2), r"SelfNormConv2d: expected stride 1, got 2"),
    "groups": (lambda: SelfNormConv2d(4, 3, groups=3), r"SelfNormConv2d: expected groups that divide the 4 channels, got 3"),
    "no groups": (lambda: ExactConv2d(4, 3, groups=0), r"ExactConv2d: expected groups .*at least 1, got 0"),
    "padding": (
        lambda: SelfNormConv2d(2, 3, padding_mode="reflect"),
        r"expected padding_mode 'zeros' or 'circular', got 'reflect'",
    ),
    "dilation": (
        lambda: SelfNormConv2d(2, 3, dilation=0),
        r"SelfNormConv2d: expected dilation to be a whole number of at least 1, got 0",
    ),
    "channels": (lambda: Conv1x1(0), r"Conv1x1: expected channels to be a whole number of at least 1, got 0"),
    "features": (lambda: SelfNormLinear(-1), r"SelfNormLinear: expected features .* got -1"),
    "float features": (lambda: ExactLinear(2.0), r"ExactLinear: expected features .* got 2.0"),
    "alpha": (lambda: SmoothLeakyReLU(-0.1), r"SmoothLeakyReLU: expected alpha in \[1e-6, 1\], got -0.1"),
    "logit alpha": (lambda: Logit(0.5), r"Logit: expected alpha in \[0, 0.5\), got 0.5"),
    "scale": (lambda: Affine(0.0, 0.0), r"Affine: expected a finite shift and a finite scale other than 0"),
    "shift": (lambda: Affine(float("nan"), 1.0), r"Affine: expected a finite shift"),
    "context": (lambda: AffineCoupling(2, 4, -1), r"AffineCoupling: expected context_channels of at least 0, got -1"),
    "bins": (lambda: SplineActivation(3, bins=0), r"SplineActivation: expected bins .* got 0"),
    "many bins": (lambda: SplineActivation(3, bins=1000), r"SplineActivation: expected fewer than 1000 bins"),
    "bound": (lambda: SplineActivation(3, bound=0.0), r"SplineActivation: expected a finite bound above 0, got 0.0"),
    "coupling": (lambda: AffineCoupling(1), r"AffineCoupling: expected at least 2 channels to split, got 1"),
    "endless bound": (lambda: SplineActivation(3, bound=float("inf")), r"expected a finite bound above 0, got inf"),
    "negative shape": (lambda: SplineActivation(-3), r"SplineActivation: expected every side of the shape .* got -3"),
    "empty shape": (lambda: fc_flow(()), r"fc_flow: expected a shape with at least one side, got \(\)"),
    "number for an image": (lambda: glow(28), r"glow: expected a shape \(C, H, W\)"),
    "negative sides": (lambda: fc_flow((-2, -2)), r"fc_flow: expected every side of the shape .* got -2"),
    "three sides": (
        lambda: SelfNormConv2d(2, (3, 3, 3)),
        r"expected kernel_size to be a number or \(height, width\), got \(3, 3, 3\)",
    ),
    "text": (lambda: SelfNormConv2d(2, "3"), r"SelfNormConv2d: expected kernel_size"),
    "no bijection": (lambda: Split(torch.nn.Linear(2, 2)), r"Split: expected rest to be a Bijection, got Linear"),
    "no prior": (lambda: Split(Squeeze(), torch.nn.Linear(2, 2)), r"Split: expected prior to be a Bijection, got Linear"),
    "factor": (lambda: Squeeze(0), r"Squeeze: expected factor .* got 0"),
    "actnorm": (lambda: ActNorm(0), r"ActNorm: expected channels .* got 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_constructors_refuse(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("method", ["forward", "inverse", "surrogate", "approx_inverse", "refined_inverse", "auto_inverse"])
@pytest.mark.parametrize(
    ("layer", "x", "message"),
    [
        (SelfNormLinear(3), torch.randn(3), r"SelfNormLinear\(3, bias=True\): expected an input of shape \(N, 3\), got \(3,\)"),
        (SelfNormLinear(3), torch.randn(2, 4), r"expected an input of shape \(N, 3\), got \(2, 4\)"),
        (ExactLinear(3), torch.randn(2, 3, 1), r"ExactLinear.*got \(2, 3, 1\)"),
        (SelfNormConv2d(2, 3), torch.randn(2, 4, 4), r"expected an input of shape \(N, 2, H, W\), got \(2, 4, 4\)"),
        (SelfNormConv2d(2, 3), torch.randn(2, 3, 4, 4), r"got \(2, 3, 4, 4\)"),
        (
            SelfNormConv2d(2, 5, padding_mode="circular"),
            torch.randn(2, 2, 4, 8),
            r"expected images of at least 5×5 for a circular kernel_size of \(5, 5\) .* got 4×8",
        ),
        (
            SelfNormConv2d(2, 3, 7, padding_mode="circular"),
            torch.randn(2, 2, 8, 5),
            r"at least 7×7 for a circular inverse_kernel_size of \(7, 7\) .* got 8×5",
        ),
        (
            ExactConv2d(2, 3, dilation=3, padding_mode="circular"),
            torch.randn(2, 2, 8, 6),
            r"at least 7×7 .* with dilation \(3, 3\), got 8×6",
        ),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, torch.nn.Module) else "",
)
def test_what_linear_layers_refuse_by_every_method(layer, x, message, method):
    with pytest.raises(ValueError, match=message):
        getattr(layer.double(), method)(x.double())


@pytest.mark.parametrize("layer", [SmoothLeakyReLU(), Logit(), Affine(0.0, 2.0)], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("method", ["forward", "inverse", "surrogate"])
def test_what_layers_of_any_shape_refuse(layer, method):
    for bad in (torch.rand(()), torch.rand(3)):
        with pytest.raises(ValueError, match=rf"{type(layer).__name__}\(.*expected a batch of examples, shape \(N, …\), got"):
            getattr(layer, method)(bad)
    with pytest.raises(ValueError, match=rf"{type(layer).__name__}\(.*expected floating-point input, got torch.int64"):
        getattr(layer, method)(torch.ones(2, 3, dtype=torch.int64))


def test_a_twin_with_non_finite_weights_is_refused():
    for exact, selfnorm in ((ExactConv2d(2, 3), SelfNormConv2d(2, 3)), (ExactLinear(2), SelfNormLinear(2))):
        exact.weight.data.view(-1)[0] = float("nan")
        with pytest.raises(ValueError, match=rf"{type(selfnorm).__name__}\(.*expected finite weights"):
            selfnorm.load_state_dict(exact.state_dict())


def test_a_context_in_another_dtype():
    with pytest.raises(ValueError, match=r"expected torch.float64 on cpu, got torch.float32 on cpu"):
        AffineCoupling(2, 4, 3)(torch.randn(2, 2, 4, 4), context=torch.randn(2, 3, dtype=torch.float32))


def test_sizes_may_be_lists_and_integers_of_any_type():
    layer = SelfNormConv2d(
        np.int64(2), [3, 1], stride=(1, 1), inverse_kernel_size=np.int32(3), dilation=torch.tensor(1), groups=np.int8(1)
    )
    assert layer.weight.shape == (2, 2, 3, 1) and layer.weight_inv.shape == (2, 2, 3, 3)
    assert SelfNormLinear(np.int64(3)).weight.shape == (3, 3)
    assert fc_flow(torch.Size([1, 2])).sample(1).shape == glow([1, 2, 2], blocks=1, steps=1, hidden=2).sample(1).shape[:-1]


def test_a_circular_kernel_may_be_as_wide_as_the_image():
    SelfNormConv2d(1, 5, padding_mode="circular")(torch.randn(1, 1, 5, 5))


def test_context_that_is_missing_or_misshapen():
    layer, x = AffineCoupling(2, hidden=4, context_channels=3), torch.randn(5, 2, 4, 4)
    for context, got in ((None, "none"), (torch.randn(5, 2, 4, 4), r"\(5, 2, 4, 4\)"), (torch.randn(4, 3), r"\(4, 3, 4, 4\)")):
        with pytest.raises(
            ValueError, match=rf"AffineCoupling\(2.*expected a context of shape \(5, 3, 4, 4\) or \(5, 3\), got {got}"
        ):
            layer(x, context=context)


def test_layers_without_context_ignore_one():
    layer, x = AffineCoupling(2, hidden=4), torch.randn(5, 2, 4, 4)
    assert torch.equal(layer(x, context=torch.randn(5, 7))[0], layer(x)[0])


def test_context_changes_what_a_coupling_does():
    layer, x = AffineCoupling(2, hidden=4, context_channels=3), torch.randn(5, 2, 4, 4)
    with torch.no_grad():
        layer.affine.last.weight.add_(0.1 * torch.randn_like(layer.affine.last.weight))
    one, other = (layer(x, context=torch.randn(5, 3))[0] for _ in range(2))
    assert torch.equal(one[:, :1], other[:, :1]) and (one[:, 1:] - other[:, 1:]).abs().max() > 1e-3


def test_context_is_keyword_only():
    with pytest.raises(TypeError):
        AffineCoupling(2, hidden=4)(torch.randn(5, 2, 4, 4), None)


def test_flatten_says_what_to_do_when_it_knows_no_shape():
    with pytest.raises(ValueError, match=r"Flatten\(\): expected a known input shape, got none; build it as Flatten"):
        Flatten().inverse(torch.randn(2, 6))


def test_split_refuses_odd_channels_and_latents():
    with pytest.raises(ValueError, match=r"Split: expected an even number of channels"):
        Split(SelfNormConv2d(1, 1))(torch.randn(2, 3, 2, 2))
    with pytest.raises(ValueError, match=r"Split: expected a flat latent"):
        Split(SelfNormConv2d(1, 1)).inverse(torch.randn(2, 2, 2, 2))


def test_split_goes_back_to_the_last_shape_it_saw():
    split = Split(SelfNormConv2d(2, 3))
    for size in ((2, 6), (3, 4)):
        x = torch.randn(2, 4, *size)
        assert torch.allclose(split.inverse(split(x)[0])[0], x)
    with pytest.raises(ValueError, match=r"Split: expected a flat latent \(N, 48\), got \(2, 32\)"):
        split.inverse(torch.randn(2, 32))


def test_squeeze_refuses_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match=r"Squeeze\(2\): expected height and width divisible by 2, got 4×3"):
        Squeeze()(torch.randn(1, 1, 4, 3))
    with pytest.raises(ValueError, match=r"Squeeze\(2\): expected channels divisible by 4, got 3"):
        Squeeze().inverse(torch.randn(1, 3, 4, 4))
