"""Run as a script: compiles convolutions' kernels for a GPU of compute capability 9.0 as far as PTX, whether there is one or not.

Prints the name of each kernel, and the instructions in it that add two pairs of 16-bit numbers at once.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_ALWAYS_COMPILE"] = "1"

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface

from selfnorm import AffineCoupling, ExactConv2d, ExpConv2d, SelfNormConv2d, TrackedConv2d
from selfnorm.kernels import dispatch


class NoDevice:
    """Of Triton's drivers, all that compiling needs."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")


def compile_only(kernel, grid):
    def launch(*args, **options):
        text = JITFunction.run(kernel, *args, grid=grid, warmup=True, **options).asm["ptx"]
        pairs = [line.strip() for line in text.splitlines() if "s16x2" in line or "u16x2" in line]
        print(json.dumps([kernel.__name__, pairs]))

    return launch


driver.set_active(NoDevice())
CUDABackend.make_cubin = lambda *args: b""
KernelInterface.__getitem__ = compile_only

CASES = [
    (SelfNormConv2d(11, 3, inverse_kernel_size=(3, 5)), (2, 11, 2, 4)),
    (SelfNormConv2d(8, 5), (2, 8, 8, 8)),
    (SelfNormConv2d(1, 3), (2, 1, 9, 9)),
    (ExactConv2d(3, 7), (3, 3, 8, 8)),
    (ExactConv2d(16, 3), (2, 16, 4, 4)),
    (TrackedConv2d(12, 3, (7, 7)), (2, 12, 7, 7)),
    (ExpConv2d(12, 3), (2, 12, 6, 10)),
    (AffineCoupling(8, 16), (2, 8, 8, 8)),
]
for tf32 in (False, True):
    dispatch.allows_tf32 = lambda tf32=tf32: tf32
    for layer, shape in CASES:
        with dispatch.used_on("cpu"):
            z, log_det, reconstruction = layer.surrogate(torch.randn(shape, requires_grad=True))
            (z.sum() + log_det.sum() + reconstruction.sum()).backward()
