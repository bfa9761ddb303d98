import torch
from diffusers import DDPMScheduler, DPMSolverMultistepScheduler
from networks import EPOCHS, Captioned, text_unet
from torch.utils.data import DataLoader

network, noising = text_unet(), DDPMScheduler()
optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
for _ in range(EPOCHS):
    for x0, tokens in DataLoader(Captioned(), batch_size=64, shuffle=True, drop_last=True):
        tokens = torch.where(torch.rand(len(tokens), 1, 1) < 0.1, 0, tokens)
        noise, t = torch.randn_like(x0), torch.randint(1000, (len(x0),))
        predicted = network(noising.add_noise(x0, noise, t), t, encoder_hidden_states=tokens).sample
        loss = (predicted - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
wanted = torch.stack([Captioned()[i][1] for i in range(16)])
both = torch.cat((torch.zeros_like(wanted), wanted))
scheduler = DPMSolverMultistepScheduler.from_config(noising.config)
scheduler.set_timesteps(20)
images = torch.randn(16, 1, 8, 8)
with torch.no_grad():
    for t in scheduler.timesteps:
        null, given = network(torch.cat((images, images)), t, encoder_hidden_states=both).sample.chunk(2)
        images = scheduler.step(null + 3.0 * (given - null), t, images).prev_sample
