import torch
from diffusers import DDPMPipeline, DDPMScheduler, DPMSolverMultistepScheduler
from diffusers.training_utils import EMAModel
from diffusers.utils import make_image_grid
from networks import EPOCHS, Digits, unet
from torch.utils.data import DataLoader

network, noising = unet(), DDPMScheduler()
average = EMAModel(network.parameters(), decay=0.99)
optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
for _ in range(EPOCHS):
    for x0 in DataLoader(Digits(), batch_size=64, shuffle=True, drop_last=True):
        noise, t = torch.randn_like(x0), torch.randint(1000, (len(x0),))
        loss = (network(noising.add_noise(x0, noise, t), t).sample - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.step(network.parameters())
average.copy_to(network.parameters())
scheduler = DPMSolverMultistepScheduler.from_config(noising.config)
pictures = DDPMPipeline(network, scheduler)(16, num_inference_steps=20).images
make_image_grid(pictures, rows=4, cols=4).save("grid.png")
