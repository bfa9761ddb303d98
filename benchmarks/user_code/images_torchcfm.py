import torch
from networks import STEPS, Digits, unet
from PIL import Image
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from torchcfm.conditional_flow_matching import ConditionalFlowMatcher
from torchdiffeq import odeint

network, matcher = unet(), ConditionalFlowMatcher(sigma=0.0)
average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
step = 0
while step < STEPS:
    for x1 in DataLoader(Digits(), batch_size=64, shuffle=True, drop_last=True):
        t, xt, ut = matcher.sample_location_and_conditional_flow(torch.randn_like(x1), x1)
        loss = (network(xt, 1000 * t).sample - ut).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(network)
        step += 1
with torch.no_grad():
    field, times = lambda t, x: average(x, 1000 * t.expand(len(x))).sample, torch.linspace(0, 1, 21)
    images = odeint(field, torch.randn(16, 1, 8, 8), times, method="midpoint")[-1]
pixels = ((images + 1) * 127.5).round().clamp(0, 255).byte()
grid = pixels.reshape(4, 4, 8, 8).permute(0, 2, 1, 3).reshape(32, 32)
Image.fromarray(grid.numpy()).save("grid.png")
