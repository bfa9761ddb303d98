"""Whole networks with every kernel, in Triton's interpreter, against the plain code: values and all gradients."""

import pytest
from kernel_code import run

CODE = """
import copy, sys, torch
from mvm.network import DiT, DiTConfig
from mvm.network.fast import gpu, kernels, recompute

class Everywhere(kernels.Kernels):
    takes = staticmethod(lambda x: True)

CASES = {
    "plain": ({}, 0, False, ()),
    "taps, all but products computed again": ({}, 4, True, (2,)),
    "computed again": ({"inner_block": 2}, 3, False, ()),
    "skip and local": ({"skip": True, "local": True}, 0, False, ()),
    "shared": ({"modulation": "shared"}, 3, True, ()),
}

def gradients(network, taps):
    torch.manual_seed(1)
    x, level, labels = torch.randn(2, 1, 8, 8), torch.rand(2), torch.tensor([3, 7])
    found = network(x, level, labels, taps=taps)
    parts = [found.prediction, *(() if found.inner is None else (found.inner,)), *found.features.values()]
    sum(part.square().sum() for part in parts).backward()
    return [found.prediction, *(parameter.grad for parameter in network.parameters())]

for changes, again, keep, taps in CASES.values():
    torch.manual_seed(0)
    network = DiT(DiTConfig(size="tiny", depth=4, width=32, heads=2, design=sys.argv[1], **changes), (1, 8, 8), 10)
    network.blocks.recompute = again
    if keep:
        recompute.apply(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.2)
    wanted = gradients(copy.deepcopy(network), taps)
    gpu.apply(network, Everywhere)
    for found, want in zip(gradients(network, taps), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=2e-5 * float(want.abs().max()))
"""


@pytest.mark.parametrize("design", ["modern", "classic"])
def test_networks_learn_the_same_by_kernels(design):
    run(CODE, design, interpreted=True)
