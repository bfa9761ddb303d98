import torch
from diffusers import DDPMScheduler, DPMSolverMultistepScheduler
from diffusers.training_utils import EMAModel
from diffusers.utils import make_image_grid, numpy_to_pil
from networks import STEPS, Digits, unet
from torch.utils.data import DataLoader

network, noising = unet(), DDPMScheduler()
average = EMAModel(network.parameters(), decay=0.99)
optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
step = 0
while step < STEPS:
    for x0 in DataLoader(Digits(), batch_size=64, shuffle=True, drop_last=True):
        noise, t = torch.randn_like(x0), torch.randint(1000, (len(x0),))
        loss = (network(noising.add_noise(x0, noise, t), t).sample - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.step(network.parameters())
        step += 1
average.copy_to(network.parameters())
scheduler = DPMSolverMultistepScheduler.from_config(noising.config)
scheduler.set_timesteps(20)
images = torch.randn(16, 1, 8, 8)
with torch.no_grad():
    for t in scheduler.timesteps:
        images = scheduler.step(network(images, t).sample, t, images).prev_sample
pictures = numpy_to_pil((images / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy())
make_image_grid(pictures, rows=4, cols=4).save("grid.png")
