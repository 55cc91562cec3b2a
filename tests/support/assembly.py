"""A script that compiles the convolution kernels to PTX for a GPU of compute capability 9.0, which need not be present.

Prints the name of each kernel, and its instructions that add two pairs of 16-bit numbers at once.
"""

import json

import torch

from selfnorm import AffineCoupling, ExactConv2d, ExpConv2d, SelfNormConv2d, TrackedConv2d
from selfnorm.kernels import dispatch


class NoDevice:
    """The part of a Triton driver that compiling needs."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")


def compile_only():
    """Makes every kernel launch only compile the kernel and print its name and those instructions."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction, KernelInterface

    def launcher(kernel, grid):
        def launch(*args, **options):
            text = JITFunction.run(kernel, *args, grid=grid, warmup=True, **options).asm["ptx"]
            pairs = [line.strip() for line in text.splitlines() if "s16x2" in line or "u16x2" in line]
            print(json.dumps([kernel.__name__, pairs]))

        return launch

    driver.set_active(NoDevice())
    CUDABackend.make_cubin = lambda *args: b""
    KernelInterface.__getitem__ = launcher


def train(layer, shape):
    """Runs the surrogate of a layer and its backward pass with kernels."""
    with dispatch.used_on("cpu"):
        z, log_det, reconstruction = layer.surrogate(torch.randn(shape, requires_grad=True))
        (z.sum() + log_det.sum() + reconstruction.sum()).backward()


if __name__ == "__main__":
    compile_only()
    from selfnorm.kernels.conv import tracked

    for tf32 in (False, True):
        dispatch.allows_tf32 = tracked.allows_tf32 = lambda tf32=tf32: tf32
        tracked.error_of_convolution(torch.eye(192), torch.randn(12, 12, 3, 3), (4, 4))
        train(SelfNormConv2d(11, 3, inverse_kernel_size=(3, 5)), (2, 11, 2, 4))
        train(SelfNormConv2d(8, 5), (2, 8, 8, 8))
        train(SelfNormConv2d(1, 3), (2, 1, 9, 9))
        train(ExactConv2d(3, 7), (3, 3, 8, 8))
        train(ExactConv2d(16, 3), (2, 16, 4, 4))
        train(TrackedConv2d(12, 3, (7, 7)), (2, 12, 7, 7))
        train(ExpConv2d(12, 3), (2, 12, 6, 10))
        train(AffineCoupling(8, 16), (2, 8, 8, 8))
