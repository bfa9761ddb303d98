import torch
from networks import STEPS, Captioned, text_unet

import mvm
from mvm.solver import ClassifierFree

network = mvm.wrap(text_unet(), time=lambda t: 1000 * t, null=torch.zeros(1, 4, 16))
field = mvm.train(network, Captioned(), steps=STEPS, batch=64, lr=1e-3)
wanted = torch.stack([Captioned()[i][1] for i in range(16)])
images = mvm.sample(field, torch.randn(16, 1, 8, 8), condition=wanted, guidance=ClassifierFree(3.0))
