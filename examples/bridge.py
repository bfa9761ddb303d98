"""Sample models of other parametrisations without retraining: a flow-matching velocity, and the noise of DDPM."""

import torch

import mvm
from mvm.bridge import BetaTable, from_flow, from_model

MEAN, STD = 0.3, 0.5  # of the data; exact models of N(MEAN, STD^2 I) stand where networks would


def velocity(x, t):
    """Return E[x0 - eps | x], x = t x0 + (1 - t) eps: flow matching with data at t = 1."""
    t = t[:, None]
    away = (x - t * MEAN) / (t**2 * STD**2 + (1 - t) ** 2)
    return MEAN + t * STD**2 * away - (1 - t) * away


betas = BetaTable.from_betas(torch.linspace(1e-4, 0.02, 1000))  # DDPM's


def eps(x, step):
    """Return E[eps | x], x = alpha x0 + sigma eps, at a training step from 0 to 999."""
    alpha, sigma = (value[:, None] for value in (betas.alpha(betas.time(step)), betas.sigma(betas.time(step))))
    return sigma * (x - alpha * MEAN) / (alpha**2 * STD**2 + sigma**2)


noise = mvm.noise.initial(torch.arange(20_000), (4,), torch.float64)
exact = MEAN + STD * noise  # where the ODE takes the noise
errors = {}
for name, field in {"velocity": from_flow(velocity, data_at=1), "eps": from_model(eps, betas, "eps")}.items():
    ode = mvm.sample(field, noise, solver=field.solver, nfe=26)
    sde = mvm.sample(field, noise, solver=field.solver, nfe=26, rho=1.0, seeds=range(20_000))
    errors[name] = (ode - exact).abs().max().item()
    print(f"{name}: largest error by the ODE {errors[name]:.1e}")
    print(f"    SDE: mean {sde.mean():.3f} (exact {MEAN}), std {sde.std():.3f} (exact {STD})")
