import torch
from flow_matching.path import CondOTProbPath
from flow_matching.solver import ODESolver
from networks import EPOCHS, Digits, save_grid, unet
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

network, path = unet(), CondOTProbPath()
average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
for _ in range(EPOCHS):
    for x1 in DataLoader(Digits(), batch_size=64, shuffle=True, drop_last=True):
        sample = path.sample(x_0=torch.randn_like(x1), x_1=x1, t=torch.rand(len(x1)))
        loss = (network(sample.x_t, 1000 * sample.t).sample - sample.dx_t).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(network)
solver = ODESolver(velocity_model=lambda x, t: average(x, 1000 * t.expand(len(x))).sample)
images = solver.sample(x_init=torch.randn(16, 1, 8, 8), method="midpoint", step_size=0.05)
save_grid(images, "grid.png")
