import torch
from flow_matching.path import CondOTProbPath
from flow_matching.solver import ODESolver
from networks import STEPS, Digits, unet
from PIL import Image
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

network, path = unet(), CondOTProbPath()
average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
step = 0
while step < STEPS:
    for x1 in DataLoader(Digits(), batch_size=64, shuffle=True, drop_last=True):
        sample = path.sample(x_0=torch.randn_like(x1), x_1=x1, t=torch.rand(len(x1)))
        loss = (network(sample.x_t, 1000 * sample.t).sample - sample.dx_t).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(network)
        step += 1
solver = ODESolver(velocity_model=lambda x, t: average(x, 1000 * t.expand(len(x))).sample)
images = solver.sample(x_init=torch.randn(16, 1, 8, 8), method="midpoint", step_size=0.05)
pixels = ((images + 1) * 127.5).round().clamp(0, 255).byte()
grid = pixels.reshape(4, 4, 8, 8).permute(0, 2, 1, 3).reshape(32, 32)
Image.fromarray(grid.numpy()).save("grid.png")
