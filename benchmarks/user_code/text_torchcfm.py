import torch
from networks import EPOCHS, Captioned, text_unet
from torch.utils.data import DataLoader
from torchcfm.conditional_flow_matching import ConditionalFlowMatcher
from torchdiffeq import odeint

network, matcher = text_unet(), ConditionalFlowMatcher(sigma=0.0)
optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
for _ in range(EPOCHS):
    for x1, tokens in DataLoader(Captioned(), batch_size=64, shuffle=True, drop_last=True):
        tokens = torch.where(torch.rand(len(tokens), 1, 1) < 0.1, 0, tokens)
        t, xt, ut = matcher.sample_location_and_conditional_flow(torch.randn_like(x1), x1)
        loss = (network(xt, 1000 * t, encoder_hidden_states=tokens).sample - ut).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
wanted = torch.stack([Captioned()[i][1] for i in range(16)])
both = torch.cat((torch.zeros_like(wanted), wanted))


def guided(t, x):
    null, given = network(torch.cat((x, x)), 1000 * t.expand(2 * len(x)), encoder_hidden_states=both).sample.chunk(2)
    return null + 3.0 * (given - null)


with torch.no_grad():
    images = odeint(guided, torch.randn(16, 1, 8, 8), torch.linspace(0, 1, 21), method="midpoint")[-1]
