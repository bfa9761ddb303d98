import torch
from networks import MLP, STEPS, moons
from torchcfm.conditional_flow_matching import ConditionalFlowMatcher
from torchdiffeq import odeint

network, matcher = MLP(), ConditionalFlowMatcher(sigma=0.0)
optimizer = torch.optim.Adam(network.parameters(), 1e-3)
for _ in range(STEPS):
    x1 = moons(256)
    t, xt, ut = matcher.sample_location_and_conditional_flow(torch.randn_like(x1), x1)
    loss = (network(xt, t) - ut).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    points = odeint(lambda t, x: network(x, t.expand(len(x))), torch.randn(500, 2), torch.linspace(0, 1, 2))[-1]
