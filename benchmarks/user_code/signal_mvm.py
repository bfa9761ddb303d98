import torch
from networks import STEPS, Convolutions, sines

import mvm

field = mvm.train(Convolutions(), sines(256), steps=STEPS, batch=256, lr=1e-3)
signals = mvm.sample(field, torch.randn(16, 1, 64))
