import torch
from diffusers import DDPMScheduler, DPMSolverMultistepScheduler
from networks import MLP, STEPS, moons

network, noising = MLP(), DDPMScheduler()
optimizer = torch.optim.Adam(network.parameters(), 1e-3)
for _ in range(STEPS):
    x0 = moons(256)
    noise, t = torch.randn_like(x0), torch.randint(1000, (len(x0),))
    loss = (network(noising.add_noise(x0, noise, t), t / 1000) - noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
scheduler = DPMSolverMultistepScheduler.from_config(noising.config)
scheduler.set_timesteps(20)
points = torch.randn(500, 2)
with torch.no_grad():
    for t in scheduler.timesteps:
        points = scheduler.step(network(points, t.expand(len(points)) / 1000), t, points).prev_sample
