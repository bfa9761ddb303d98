import torch
from diffusers import RePaintPipeline, RePaintScheduler
from networks import Digits, unet

pipe = RePaintPipeline(unet=unet(), scheduler=RePaintScheduler())
known = torch.stack([Digits()[i] for i in range(16)])
mask = torch.zeros(16, 1, 8, 8)
mask[..., :4] = 1
images = pipe(image=known, mask_image=mask, num_inference_steps=26, output_type="np").images
