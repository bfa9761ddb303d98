"""A SwiGLU's products and gate in one kernel: where it is taken, with stand-ins, and its code for Hopper.

Its values need a Hopper GPU: benchmarks/device_parity.py compares them there.
"""

import os
import subprocess
import sys

import pytest
import torch
from stand_ins import Counted

from mvm.network.fast import gpu
from mvm.network.fast.float8 import product_dtype
from mvm.network.layers import SwiGLU

BF16 = torch.bfloat16


def suits(x, hidden):
    assert (x.shape[-1], hidden) == (32, 96)
    return True


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return SwiGLU(32)


def test_it_is_for_sampling(layer):
    x = torch.randn(2, 9, 32, dtype=BF16)
    wanted = layer.to(BF16).hidden(x)
    kernels = Counted(takes_gated_product=suits)
    gpu.apply(layer, kernels, sampling=True)
    with torch.no_grad():
        found = layer.hidden(x)
    assert kernels.calls == {"gated_product": 1}
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.01)
    layer.hidden(x)
    assert kernels.calls == {"gated_product": 1, "gated": 1}


def test_where_it_does_not_suit_there_is_no_kernel_without_a_gradient(layer):
    x, kernels = torch.randn(2, 9, 32, dtype=BF16), Counted(takes_gated_product=lambda x, hidden: False)
    layer.to(BF16)
    with torch.no_grad():
        wanted = layer.hidden(x)
        gpu.apply(layer, kernels)
        assert torch.equal(layer.hidden(x), wanted)
    assert not kernels.calls


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "taken"), [(BF16, {"gated_product": 1}), (torch.float16, {})])
def test_autocast_decides_the_dtype_and_a_compiler_can_look_into_it(layer, compiled, dtype, taken):
    kernels = Counted(takes_gated_product=suits)
    gpu.apply(layer, kernels)
    hidden = torch.compile(layer.hidden, backend="eager", fullgraph=True) if compiled else layer.hidden
    with torch.no_grad(), torch.autocast("cpu", dtype):
        assert product_dtype(torch.zeros(1)) == dtype
        hidden(torch.randn(2, 9, 32))
    assert kernels.calls == taken


# Where it can be had, and is faster: most of the GPU must have work. Its operator knows the shape of its answer.
CHOICE = """
import sys, torch
from mvm.network.fast.kernels import gated_product, takes_gated_product
module = sys.modules["mvm.network.fast.kernels.gated_product"]

def takes(rows, width=384, hidden=1024):
    return takes_gated_product(torch.empty(rows, width, device="meta"), hidden)

assert module.PROGRAMS == 0 and not takes(131072)  # no GPU
torch.cuda.is_available, torch.cuda.get_device_capability = lambda: True, lambda: (9, 0)
torch.cuda.get_device_properties = lambda device: type("H200", (), {"multi_processor_count": 132})
assert module._programs() == 132
for version in ("3.5.1", "3.7.0", "4.0.0"):
    module.triton.__version__ = version
    assert module._programs() == 0
module.PROGRAMS = 10
assert [rows for rows in range(0, 2600, 50) if takes(rows)] == [*range(800, 1300, 50), *range(1700, 2600, 50)]
assert takes(1280, 256, 688) and not takes(1280, 96) and not takes(1280, 384, 1020)
x, weight, bias = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in ((2, 5, 64), (48, 64), (48,)))
found = gated_product(x, weight, bias)
assert found.shape == (2, 5, 24) and found.dtype == torch.bfloat16
"""

# For Hopper, without one: by its own products, 64 rows and both halves of a tile at once, every copy by the unit for
# it, all within a program's registers and shared memory.
INSTRUCTIONS = """
import re, subprocess, sys, triton
from pathlib import Path
from tempfile import TemporaryDirectory
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from mvm.network.fast.kernels.gated_product import OTHERS, RINGS
from mvm.network.fast.kernels.gated_product_gluon import TILES, gated_product_kernel as kernel

ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
tiles = [f"tensordesc<bf16{shape},{layout!r}>" for shape, layout in TILES]
even = {(place,): [["tt.divisibility", 16]] for place in (3, 4, 5)}
for width, bias in ((384, "*fp32"), (256, "*fp32"), (768, "*bf16")):
    kinds = [*tiles, bias, "i32", "i32", *3 * ["constexpr"]]
    fixed = {(6,): width, (7,): RINGS.get(width, OTHERS)[0], (8,): RINGS.get(width, OTHERS)[1]}
    code = GluonASTSource(kernel, dict(zip(kernel.arg_names, kinds, strict=True)), fixed, even)
    made = triton.compile(code, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = made.asm["ptx"]
    assert made.metadata.shared <= 232448, made.metadata.shared
    assert set(re.findall(r"wgmma[.]mma_async[.]\\S*?(m\\d+n\\d+k\\d+)", ptx)) == {"m64n256k16"}
    assert "cp.async.bulk.tensor" in ptx and "st.global" not in ptx
    with TemporaryDirectory() as folder:
        Path(folder, "a.ptx").write_text(ptx)
        command = [ptxas, "-v", "--gpu-name=sm_90a", "a.ptx", "-o", "a.cubin"]
        told = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in told and "serializ" not in told, told
"""


@pytest.mark.parametrize("code", [CHOICE, INSTRUCTIONS], ids=["choice", "instructions"])
def test_the_kernel(code):
    pytest.importorskip("triton.experimental.gluon", reason="Triton comes with torch's GPU builds, Gluon with new ones")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
