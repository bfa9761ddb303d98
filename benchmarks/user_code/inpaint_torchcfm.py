import itertools

import torch
from networks import Digits, unet

network = unet()
known = torch.stack([Digits()[i] for i in range(16)])
mask = torch.zeros(16, 1, 8, 8)
mask[..., :4] = 1
x, noise = torch.randn_like(known), torch.randn_like(known)
times = torch.linspace(0, 1, 101)
with torch.no_grad():
    for t, following in itertools.pairwise(times):
        x = mask * (t * known + (1 - t) * noise) + (1 - mask) * x
        x = x + (following - t) * network(x, 1000 * t.expand(16)).sample
images = mask * known + (1 - mask) * x
