"""Any callable (x, t, condition) -> x0_hat is a field: sample a mixture of two Gaussians from its posterior mean."""

import torch

import mvm

WEIGHTS = torch.tensor([0.3, 0.7], dtype=torch.float64)
MEANS = torch.tensor([-1.0, 1.0], dtype=torch.float64)
STDS = torch.tensor([0.2, 0.5], dtype=torch.float64)


def field(x, t, condition=None):
    """Return E[x0 | x_t = x] on the path x_t = (1 - t) x0 + sqrt(t) eps; x (B, 1), t float64 (B,)."""
    alpha = 1 - t[:, None]
    variance = alpha**2 * STDS**2 + t[:, None]  # (B, 2), of x_t in each component
    away = x - alpha * MEANS
    share = torch.softmax(WEIGHTS.log() - variance.log() / 2 - away**2 / (2 * variance), dim=1)
    return (share * (MEANS + alpha * STDS**2 / variance * away)).sum(1, keepdim=True)


seeds = torch.arange(20_000)  # a sample's noise is a function of its seed
noise = mvm.noise.initial(seeds, (1,), torch.float64)
samples = {"ODE": mvm.sample(field, noise), "SDE": mvm.sample(field, noise, rho=1.0, seeds=seeds)}

mean = (WEIGHTS * MEANS).sum()
std = ((WEIGHTS * (STDS**2 + MEANS**2)).sum() - mean**2).sqrt()
print(f"exact  mean {mean:.3f}  std {std:.3f}")
for name, x in samples.items():
    print(f"{name}    mean {x.mean():.3f}  std {x.std():.3f}")
