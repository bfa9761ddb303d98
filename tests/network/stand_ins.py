"""The GPU's kernels in plain torch, for any device and precision: what modules ask of them, not how they compute it."""

from collections import Counter

import torch
from torch.nn.functional import gelu, linear, silu

from mvm.network.extras import Local
from mvm.network.layers import NORM_EPS, modulate, norm_rotate


class BiasElsewhere(torch.autograd.Function):
    """y, in which a bias is that was detached: its gradient is had here."""

    @staticmethod
    def forward(ctx, y, bias):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.flatten(0, 1).sum(0)


def halved(both):
    gate, up = both.chunk(2, dim=-1)
    return silu(gate) * up


class StandIns:
    """As kernels.Kernels."""

    @staticmethod
    def takes(x):
        return True

    @staticmethod
    def placed(qkv, q_weight, k_weight, cos, sin, eps):
        assert eps == NORM_EPS
        assert qkv.is_contiguous()
        query, key, value = qkv.unbind(2)
        return norm_rotate(query, q_weight, cos, sin), norm_rotate(key, k_weight, cos, sin), value

    @staticmethod
    def parted(qkv, bias):
        return BiasElsewhere.apply(qkv.flatten(2), bias).view_as(qkv).unbind(2)

    @staticmethod
    def gated(both, bias):
        return halved(both + bias)

    @staticmethod
    def biased_gelu(x, bias):
        return gelu(x + bias, approximate="tanh")

    @staticmethod
    def takes_gated_product(x, hidden):
        return True

    @staticmethod
    def gated_product(x, weight, bias):
        assert x.dtype == weight.dtype == torch.bfloat16
        return halved(linear(x.float(), weight.float(), bias.float())).bfloat16()

    @staticmethod
    def norm_modulate(x, shift, scale, eps, centred):
        assert eps == NORM_EPS
        return modulate(x, shift, scale, centred)

    @staticmethod
    def add_modulate(x, y, bias, gate, shift, scale, eps, centred):
        assert eps == NORM_EPS
        x = x + gate * BiasElsewhere.apply(y, bias)
        return x, modulate(x, shift, scale, centred)

    @staticmethod
    def add_local(x, weight):
        layer = Local(x.shape[2], (round(x.shape[1] ** 0.5),) * 2)
        return torch.func.functional_call(layer, {"weight": weight}, (x,))


class Counted:
    """Stand-ins that count their calls; `takes` may be another."""

    def __init__(self, **others):
        self.calls, self.others = Counter(), others

    def __getattr__(self, name):
        call = self.others.get(name, getattr(StandIns, name))

        def counted(*given):
            if not name.startswith("takes"):
                self.calls[name] += 1
            return call(*given)

        return counted
