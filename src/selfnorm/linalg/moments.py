"""Second moments of what a convolution's kernel sees of its input."""

from __future__ import annotations

import torch
from torch import Tensor

from selfnorm.linalg.convmatrix import Geometry


def patch_second_moment(h: Tensor, kernel_size: tuple[int, int], geometry: Geometry) -> Tensor:
    """Returns E[ppᵀ] of the patches p that a kernel covers in images h (N, C, H, W): (groups, m, m), m = C/groups·kh·kw.

    The mean is over examples and over all positions of the patch that touch the image. Pixels outside of it are zero, or wrap
    around if the padding is circular, so that an entry depends only on its two channels and on the offset between its two taps. A
    kernel as large as a circular image gives a circulant matrix, whose eigenvalues are those of E[ĥĥ*] at all frequencies.

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
