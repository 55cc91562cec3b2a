"""Second moments of patches, against sums over explicit patches."""

import pytest
import torch
import torch.nn.functional as F

from selfnorm.linalg.convmatrix import Geometry
from selfnorm.linalg.moments import patch_second_moment


def explicit(h, kernel_size, geometry):
    """Returns the same by cutting every patch out of the padded images."""
    n, _, height, width = h.shape
    reach = [d * (k - 1) for d, k in zip(geometry.dilation, kernel_size, strict=True)]
    circular = geometry.padding_mode == "circular"
    # Circular: one patch for each pixel. Zeros: every patch that touches the image.
    padding = (0, reach[1], 0, reach[0]) if circular else (reach[1], reach[1], reach[0], reach[0])
    padded = F.pad(h, padding, mode="circular" if circular else "constant")
    moments = []
    for group in padded.chunk(geometry.groups, dim=1):
        patches = F.unfold(group, kernel_size, dilation=geometry.dilation).movedim(1, 2).flatten(0, 1)
        moments.append(patches.mT @ patches / (n * height * width))
    return torch.stack(moments)


@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
@pytest.mark.parametrize(
    ("channels", "kernel_size", "dilation", "groups"),
    [(1, (1, 1), (1, 1), 1), (3, (1, 1), (1, 1), 1), (2, (3, 3), (1, 1), 1), (4, (3, 1), (2, 1), 2), (2, (5, 7), (1, 1), 1)],
)
def test_moments_are_those_of_explicit_patches(channels, kernel_size, dilation, groups, padding_mode):
    h = torch.randn(6, channels, 5, 7) * torch.linspace(0.2, 2, 7) + 0.5
    geometry = Geometry(dilation, groups, padding_mode)
    torch.testing.assert_close(patch_second_moment(h, kernel_size, geometry), explicit(h, kernel_size, geometry))


def test_a_kernel_of_the_size_of_a_circular_image_has_the_eigenvalues_of_the_symbols():
    h = torch.randn(9, 2, 3, 5) * torch.linspace(0.2, 2, 5)
    spectrum = torch.fft.fft2(h, norm="ortho").permute(2, 3, 0, 1)
    symbols = torch.einsum("hwnc,hwnd->hwcd", spectrum, spectrum.conj()) / len(h)
    (moment,) = patch_second_moment(h, (3, 5), Geometry(padding_mode="circular"))
    torch.testing.assert_close(torch.linalg.eigvalsh(moment), torch.linalg.eigvalsh(symbols).flatten().sort().values)
