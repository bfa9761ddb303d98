import torch
from flow_matching.path import CondOTProbPath
from flow_matching.solver import ODESolver
from networks import MLP, STEPS, moons

network, path = MLP(), CondOTProbPath()
optimizer = torch.optim.Adam(network.parameters(), 1e-3)
for _ in range(STEPS):
    x1 = moons(256)
    sample = path.sample(x_0=torch.randn_like(x1), x_1=x1, t=torch.rand(len(x1)))
    loss = (network(sample.x_t, sample.t) - sample.dx_t).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
solver = ODESolver(velocity_model=lambda x, t: network(x, t.expand(len(x))))
points = solver.sample(x_init=torch.randn(500, 2), method="midpoint", step_size=0.05)
