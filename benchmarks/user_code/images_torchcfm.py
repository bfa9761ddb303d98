import torch
from networks import EPOCHS, Digits, save_grid, unet
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from torchcfm.conditional_flow_matching import ConditionalFlowMatcher
from torchdiffeq import odeint

network, matcher = unet(), ConditionalFlowMatcher(sigma=0.0)
average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
for _ in range(EPOCHS):
    for x1 in DataLoader(Digits(), batch_size=64, shuffle=True, drop_last=True):
        t, xt, ut = matcher.sample_location_and_conditional_flow(torch.randn_like(x1), x1)
        loss = (network(xt, 1000 * t).sample - ut).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(network)
with torch.no_grad():
    noise, times = torch.randn(16, 1, 8, 8), torch.linspace(0, 1, 21)
    images = odeint(lambda t, x: average(x, 1000 * t.expand(len(x))).sample, noise, times, method="midpoint")[-1]
save_grid(images, "grid.png")
