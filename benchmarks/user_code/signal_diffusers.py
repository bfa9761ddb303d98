import torch
from diffusers import DDPMScheduler, DPMSolverMultistepScheduler
from networks import STEPS, Convolutions, sines

network, noising = Convolutions(), DDPMScheduler()
optimizer = torch.optim.Adam(network.parameters(), 1e-3)
for _ in range(STEPS):
    x0 = sines(256)
    noise, t = torch.randn_like(x0), torch.randint(1000, (len(x0),))
    loss = (network(noising.add_noise(x0, noise, t), t / 1000) - noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
scheduler = DPMSolverMultistepScheduler.from_config(noising.config)
scheduler.set_timesteps(20)
signals = torch.randn(16, 1, 64)
with torch.no_grad():
    for t in scheduler.timesteps:
        signals = scheduler.step(network(signals, t.expand(len(signals)) / 1000), t, signals).prev_sample
