"""The kernel that rounds a matrix both ways: its bits in Triton's interpreter, and its place in a compiled product."""

import pytest
from kernel_code import NAMED_GPU, run

# The interpreter rounds to 8 bits in a way of its own, so there values are ones that 8 bits hold; products and places
# are compared in other formats too. How a GPU rounds is in its instruction, below, and in benchmarks/device_parity.py.
CODE = """
import torch
from mvm.network.fast import float8
from mvm.network.fast.kernels import cast
from mvm.network.fast.kernels.cast import rounded_both_ways

def compare(x, factor, dtype):
    before = x.clone()
    wanted = (x.float() * factor).to(dtype)
    values, transposed = rounded_both_ways(x, factor, dtype)
    for found, want in ((values, wanted), (transposed, wanted.t())):
        assert found.dtype == dtype and found.shape == want.shape and found.is_contiguous()
        assert torch.equal(found.float(), want.float()), (x.shape, dtype)
    assert torch.equal(x, before)

def held(rows, width, dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()]
    return codes[torch.randint(len(codes), (rows, width))]

r = torch.randn
torch.manual_seed(0)
kinds = torch.float8_e4m3fn, torch.float8_e5m2

for tile in ((128, 128, 8), (128, 64, 4), (64, 128, 4)):
    cast.TILE = tile
    for rows, width in ((128, 128), (256, 384), (48, 16), (130, 70), (1, 300), (300, 1), (1, 1), (127, 129)):
        for dtype in kinds:
            compare(held(rows, width, dtype).bfloat16(), torch.tensor(1.0), dtype)
            compare(held(rows, width, dtype) * 2.0**-20, torch.tensor(2.0**20), dtype)
        for dtype in (torch.float32, torch.float16):
            compare(r(rows, width).bfloat16(), torch.tensor(1.2345), dtype)

# whatever its strides
spread = r(130, 1).expand(130, 70), r(70).expand(130, 70)
for x in (r(70, 130).t(), r(130, 200)[:, 20:90], r(260, 140)[::2, ::2], *spread):
    compare(x, torch.tensor(1.2345), torch.float32)

# in its place: bits and scales of the plain code
for dtype in kinds:
    largest = torch.finfo(dtype).max
    for x in (held(48, 80, dtype), held(48, 80, dtype).bfloat16(), torch.zeros(16, 32), torch.zeros(16, 32).bfloat16()):
        x[3, 5] = largest * (x.any() > 0)
        for scale in (1.0, 2.0**-10, 2.0**10):
            wanted = float8.scaled_both_ways(x * scale, "tensor", dtype)
            float8._on_gpu = lambda x: True
            found = float8.scaled_both_ways(x * scale, "tensor", dtype)
            float8._on_gpu = lambda x: False
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
                assert torch.equal(one.scale, other.scale)
"""

# A block's products compile whole, with the kernel in them and no input that passes for written: the compiler would
# copy it before every call. The graphs are read and never run.
MUTATIONS = """
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from mvm.network.fast import float8

float8._on_gpu = lambda x: True
graphs = []

def read(graph, inputs):
    kernels = [node for node in graph.graph.nodes if "triton" in str(node.target)]
    graphs.append([sorted(node.kwargs["tensors_to_clone"]) for node in kernels])
    (answers,) = graph.graph.find_nodes(op="output")
    shapes = [node if node is None else node.meta["val"] for node in answers.args[0]]
    empty = lambda value: torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
    return make_boxed_func(lambda *given: [empty(value) for value in shapes])

def work(x, *weights):
    return sum(float8.products(x, weights, (None, None), "tensor"))

x, *weights = (torch.randn(shape, requires_grad=True) for shape in ((2, 9, 32), (48, 32), (48, 32)))
with torch.autocast("cpu", torch.bfloat16):
    found = torch.compile(work, backend=aot_autograd(fw_compiler=read, bw_compiler=read), fullgraph=True)(x, *weights)
assert found.shape == (2, 9, 48) and found.dtype == torch.bfloat16
found.sum().backward()
assert graphs == [[["transposed", "values"]], 4 * [["transposed", "values"]]], graphs
"""

# For Hopper, without one: it rounds by its own instruction, and reads and writes no fewer than 16 bytes at a time.
INSTRUCTIONS = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mvm.network.fast.kernels.cast import TILE, cast_kernel

names = cast_kernel.arg_names
*tile, warps = TILE
for source, kind, instruction in (
    ("*bf16", "*fp8e4nv", "e4m3x2"), ("*bf16", "*fp8e5", "e5m2x2"), ("*fp32", "*fp8e4nv", "e4m3x2")
):
    kinds = [source, "*fp32", kind, kind, "i32", "i32", "constexpr", "constexpr"]
    even = {(place,): [["tt.divisibility", 16]] for place in range(6)}
    code = ASTSource(cast_kernel, dict(zip(names, kinds, strict=True)), {(6,): tile[0], (7,): tile[1]}, even)
    ptx = triton.compile(code, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
    assert f"cvt.rn.satfinite.{instruction}.f32" in ptx
    moves = re.findall(r"(?:ld|st)[.]global[.](\\S+)", ptx)
    assert sorted(set(moves)) == ["b32", "v4.b32"] and moves.count("b32") == 1, moves  # one: the factor
"""


@pytest.mark.parametrize(
    ("code", "interpreted"),
    [(CODE, True), (NAMED_GPU + MUTATIONS, False), (INSTRUCTIONS, False)],
    ids=["values", "compiled", "instructions"],
)
def test_the_kernel_gives_the_bits_of_the_plain_code_and_writes_to_no_input(code, interpreted):
    run(code, interpreted=interpreted)
