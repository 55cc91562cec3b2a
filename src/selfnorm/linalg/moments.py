"""Second moments of what a convolution's kernel sees of its input, and which change of a kernel they hold least."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from selfnorm.linalg.convmatrix import Geometry


def patch_second_moment(h: Tensor, kernel_size: tuple[int, int], geometry: Geometry) -> Tensor:
    """Returns E[ppᵀ] of the patches p that a kernel covers in images h (N, C, H, W): (groups, m, m), m = C/groups·kh·kw.

    The mean over examples of the sum over all positions that touch the image, divided by the number of pixels. Pixels outside of
    the image are zero, or wrap around if the padding is circular, so that an entry depends only on its two channels and on the
    offset between its two taps. A kernel as large as a circular image gives a circulant matrix, whose eigenvalues are those of
    E[ĥĥ*] at all frequencies.

    Cost: one FFT of h and O(N·C²/groups·HW).
    """
    n, channels, height, width = h.shape
    per_group = channels // geometry.groups
    reaches = [dilation * (taps - 1) for dilation, taps in zip(geometry.dilation, kernel_size, strict=True)]
    # Zeros around the image keep the two ends of a patch from meeting.
    margins = [0, 0] if geometry.padding_mode == "circular" else reaches
    size = (height + margins[0], width + margins[1])
    spectrum = torch.fft.fft2(h, s=size).reshape(n, geometry.groups, per_group, -1).permute(1, 3, 2, 0)  # (groups, ω, c, N)
    power = spectrum.conj() @ spectrum.mT / (n * height * width)
    # The correlation of channel a at p with channel b at p + offset: (groups, offset, a, b).
    correlation = torch.fft.ifft2(power.unflatten(1, size), dim=(1, 2)).real.flatten(1, 2)
    rows, columns = (
        (dilation * torch.arange(taps, device=h.device)) for dilation, taps in zip(geometry.dilation, kernel_size, strict=True)
    )
    down = (rows[None, :] - rows[:, None]) % size[0]  # (kh, kh): from one tap to the other
    right = (columns[None, :] - columns[:, None]) % size[1]
    offset = down[:, None, :, None] * size[1] + right[None, :, None, :]  # (kh, kw, kh', kw')
    moment = correlation[:, offset.flatten()].unflatten(1, offset.shape)  # (groups, kh, kw, kh', kw', a, b)
    order = per_group * kernel_size[0] * kernel_size[1]
    return moment.permute(0, 5, 1, 2, 6, 3, 4).reshape(geometry.groups, order, order)


def moment_on_centre(moment: Tensor, kernel_size: tuple[int, int], centre_size: tuple[int, int]) -> Tensor:
    """Returns the Schur complement of a moment of patches (groups, m, m) on their central taps: what holds a change of these if
    all other taps are free to reduce its effect."""
    if kernel_size == centre_size:
        return moment
    inside = torch.zeros(kernel_size, dtype=torch.bool, device=moment.device)
    top, left = ((size - central) // 2 for size, central in zip(kernel_size, centre_size, strict=True))
    inside[top : top + centre_size[0], left : left + centre_size[1]] = True
    kept = inside.flatten().repeat(moment.shape[-1] // inside.numel())
    return torch.linalg.inv(torch.linalg.inv(moment)[:, kept][:, :, kept])


def largest_mu(moment: Tensor, kernel_size: tuple[int, int]) -> float:
    """Returns the largest μ with Te = μ·eP for a kernel e (c, c, kh, kw), where T transposes its map and P (m, m) is a moment of
    patches, m = c·kh·kw. It is 1/λ_min(P) for 1×1 kernels, and at most that for others; infinite for P = 0.

    Cost: O(m³), and O(c·m²) for each iteration of Lanczos' method.
    """
    from scipy.sparse.linalg import LinearOperator, eigsh

    values, vectors = torch.linalg.eigh(moment)
    # Rounding may make the smallest of very different eigenvalues negative.
    values = values.clamp_min(torch.finfo(values.dtype).eps * float(values.max()))
    if not values[0] > 0:
        return math.inf  # all zero
    if kernel_size == (1, 1):
        return 1 / float(values[0])
    root = ((vectors * values.rsqrt()) @ vectors.mT).cpu().numpy()
    order = len(root)
    channels = order // math.prod(kernel_size)

    def transposed(e: np.ndarray) -> np.ndarray:
        kernel = (e.reshape(channels, order) @ root).reshape(channels, channels, *kernel_size)
        return (kernel.swapaxes(0, 1)[:, :, ::-1, ::-1].reshape(channels, order) @ root).ravel()

    size = channels * order
    operator = LinearOperator((size, size), matvec=transposed, dtype=root.dtype)
    start = np.random.default_rng(0).standard_normal(size)
    return float(eigsh(operator, k=1, which="LA", v0=start, tol=1e-6, return_eigenvectors=False)[0])
