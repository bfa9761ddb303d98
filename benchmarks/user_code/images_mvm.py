from networks import STEPS, Digits, unet

import mvm

network = mvm.wrap(unet(), time=lambda t: 1000 * t)
model = mvm.train(network, Digits(), steps=STEPS, batch=64, lr=1e-3, ema=0.99, data_values="uint8")
model.generate(16).save("grid.png")
