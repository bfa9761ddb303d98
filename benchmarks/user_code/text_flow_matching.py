import torch
from flow_matching.path import CondOTProbPath
from flow_matching.solver import ODESolver
from networks import EPOCHS, Captioned, text_unet
from torch.utils.data import DataLoader

network, path = text_unet(), CondOTProbPath()
optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
for _ in range(EPOCHS):
    for x1, tokens in DataLoader(Captioned(), batch_size=64, shuffle=True, drop_last=True):
        tokens = torch.where(torch.rand(len(tokens), 1, 1) < 0.1, 0, tokens)
        sample = path.sample(x_0=torch.randn_like(x1), x_1=x1, t=torch.rand(len(x1)))
        predicted = network(sample.x_t, 1000 * sample.t, encoder_hidden_states=tokens).sample
        loss = (predicted - sample.dx_t).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def guided(x, t, tokens):
    both = torch.cat((torch.zeros_like(tokens), tokens))
    null, given = network(torch.cat((x, x)), 1000 * t.expand(2 * len(x)), encoder_hidden_states=both).sample.chunk(2)
    return null + 3.0 * (given - null)


solver = ODESolver(velocity_model=guided)
wanted = torch.stack([Captioned()[i][1] for i in range(16)])
images = solver.sample(x_init=torch.randn(16, 1, 8, 8), method="midpoint", step_size=0.05, tokens=wanted)
