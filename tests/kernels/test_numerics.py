"""Division by multiplication, and that compilers make no pairs of 16-bit numbers of it, which assemblers get wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from selfnorm.kernels.numerics import quotient_and_remainder  # noqa: E402


@triton.jit
def _divide(quotients, rests, DIVISOR: tl.constexpr, BELOW: tl.constexpr, BLOCK: tl.constexpr):
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    quotient, rest = quotient_and_remainder(x, DIVISOR, BELOW)
    tl.store(quotients + x, quotient, mask=x < BELOW)
    tl.store(rests + x, rest, mask=x < BELOW)


@pytest.mark.parametrize("below", [1, 9, 113, 8192, 16384, 16385, 70000])
@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 28, 63, 64, 641, 8191, 16384])
def test_every_number_below_the_bound(divisor, below, device):
    quotients, rests = torch.full((2, below), -1, dtype=torch.int32, device=device)
    block = 16384
    _divide[(triton.cdiv(below, block),)](quotients, rests, DIVISOR=divisor, BELOW=below, BLOCK=block)
    x = torch.arange(below, device=device)
    assert torch.equal(quotients.long(), x // divisor)
    assert torch.equal(rests.long(), x % divisor)


@pytest.mark.slow  # it compiles many kernels, with or without a GPU
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler for CUDA is there on Linux alone")
def test_no_kernel_adds_pairs_of_16_bit_numbers(device, tmp_path):
    """Their sums are wrong with NVIDIA's assemblers up to 13.0 at least. Among a GPU's tests, too: its Triton may be another."""
    script = Path(__file__).parents[1] / "support" / "assembly.py"
    # What is compiled goes no further than PTX: no other process must find it in its cache.
    compiling = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    printed = subprocess.run([sys.executable, script], env=compiling, capture_output=True, text=True, timeout=300)
    assert printed.returncode == 0, printed.stderr
    found = [json.loads(line) for line in printed.stdout.splitlines()]
    expected = {
        "_selfnorm_conv_forward",
        "_conv_forward",
        "_series_forward",
        "_tap_means_kernel",
        "_convolution_error_kernel",
        "_gather_columns",
    }
    assert expected <= {name for name, _ in found}
    assert [kernel for kernel in found if kernel[1]] == []
