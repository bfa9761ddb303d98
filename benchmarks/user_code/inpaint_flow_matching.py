import itertools

import torch
from flow_matching.path import CondOTProbPath
from networks import Digits, unet

network, path = unet(), CondOTProbPath()
known = torch.stack([Digits()[i] for i in range(16)])
mask = torch.zeros(16, 1, 8, 8)
mask[..., :4] = 1
x, noise = torch.randn_like(known), torch.randn_like(known)
times = torch.linspace(0, 1, 101)
with torch.no_grad():
    for t, following in itertools.pairwise(times):
        there = path.sample(x_0=noise, x_1=known, t=t.expand(16)).x_t
        x = mask * there + (1 - mask) * x
        x = x + (following - t) * network(x, 1000 * t.expand(16)).sample
images = mask * known + (1 - mask) * x
