import torch
from networks import MLP, STEPS, moons

import mvm

field = mvm.train(MLP(), moons(256), steps=STEPS, batch=256, lr=1e-3)
points = mvm.sample(field, torch.randn(500, 2))
