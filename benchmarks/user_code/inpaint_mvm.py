import torch
from networks import Digits, unet

import mvm

known = torch.stack([Digits()[i] for i in range(16)])
mask = torch.zeros(8, 8)
mask[:, 4:] = 1
images = mvm.edit.inpaint(mvm.wrap(unet(), time=lambda t: 1000 * t), known, mask)
