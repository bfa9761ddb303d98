"""A network with an input for augmentation: none adds nothing, and it starts as one without."""

import pytest
import torch
from torch.nn.functional import silu

from mvm.network import AUGMENT_MAP, DDTConfig, DiT, DiTConfig, build_network, parameters
from mvm.network.fast import cpu
from mvm.network.layers import patchify, unpatchify

CONFIG = DiTConfig(size="tiny", depth=2, width=16, heads=2, patch=2)


def build(size):
    torch.manual_seed(0)
    return DiT(CONFIG, (1, 8, 8), 5, size)


def shaken(size):
    """A network with every weight random; those that both kinds have are equal."""
    network = build(size)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name != AUGMENT_MAP:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
        if size:
            network.augment.weight.copy_(torch.randn(16, size, generator=draw))
    return network


def inputs():
    draw = torch.Generator().manual_seed(2)
    return torch.randn(4, 1, 8, 8, generator=draw), torch.rand(4, generator=draw), torch.arange(4)


def numbers(size=3):
    return torch.randn(4, size, generator=torch.Generator().manual_seed(3))


def test_it_starts_as_a_network_without():
    without, with_ = build(0).state_dict(), build(3).state_dict()
    assert with_.keys() - without.keys() == {AUGMENT_MAP}
    assert with_[AUGMENT_MAP].shape == (16, 3)
    assert torch.count_nonzero(with_[AUGMENT_MAP]) == 0
    assert all(torch.equal(value, with_[name]) for name, value in without.items())


def test_without_augmentation_it_is_the_network_without():
    want = shaken(0)(*inputs()).prediction
    network = shaken(3)
    assert torch.equal(network(*inputs()).prediction, want)
    assert torch.equal(network(*inputs(), augment=torch.zeros(4, 3)).prediction, want)
    with torch.no_grad(), cpu.applied(network):  # as a CPU samples, too
        found = network(*inputs()).prediction
    without = shaken(0)
    with torch.no_grad(), cpu.applied(without):
        assert torch.equal(found, without(*inputs()).prediction)
    assert not torch.allclose(network(*inputs(), augment=numbers()).prediction, want, atol=1e-2)


def test_the_augmentation_is_added_before_the_nonlinearity():
    network = shaken(3)
    x, level, labels = inputs()
    c = silu(network.level(level) + network.label(labels) + numbers() @ network.augment.weight.T)
    tokens = network.embed(patchify(x, 2))
    for block in network.blocks:
        tokens = block(tokens, c, network.cos, network.sin)
    want = unpatchify(network.head(tokens, c), 2, 1, (4, 4))
    assert torch.allclose(network(x, level, labels, augment=numbers()).prediction, want, atol=1e-5)


def test_the_map_learns_from_augmentation():
    network = shaken(3)
    network(*inputs(), augment=numbers()).prediction.square().sum().backward()
    assert float(network.augment.weight.grad.abs().min()) > 0


def test_it_is_counted():
    assert parameters(CONFIG, (1, 8, 8), 5, 3) == parameters(CONFIG, (1, 8, 8), 5) + 3 * 16


def test_a_network_without_the_input_refuses_it():
    with pytest.raises(ValueError, match=r"augment: this network has no input for it; train with data\.augment"):
        shaken(0)(*inputs(), augment=numbers())
    with pytest.raises(ValueError, match=r"a ddt has no input for augmentation; set data\.augment to 0"):
        build_network(DDTConfig(size="tiny"), (4, 6, 6), 5, 8)
    assert type(build_network(DDTConfig(size="tiny"), (4, 6, 6), 5, 0)).__name__ == "DDT"
