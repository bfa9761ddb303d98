"""Write a guidance rule, field -> field: away from a class that is not wanted, as negative prompts do."""

import dataclasses

import torch

import mvm
from mvm.path import MEAN_VELOCITY
from mvm.solver import Guidance


@dataclasses.dataclass(frozen=True)
class Negative(Guidance):
    """away + scale (conditional - away): two passes."""

    away: int = dataclasses.field(kw_only=True)

    def guide(self, base):
        def guided(x, t, condition):
            away = base(x, t, torch.full_like(condition, self.away))
            return away + self.scale * (base(x, t, condition) - away)

        return guided


MEANS, STD, SCALE = torch.tensor([[0.0, 1.0], [1.0, -0.5]]), 0.3, 1.5
field = mvm.oracle.mixture(MEANS, STD, labels=torch.tensor([0, 1])).field(MEAN_VELOCITY)

noise = mvm.noise.initial(torch.arange(5_000), (2,), torch.float64)
wanted = torch.ones(5_000, dtype=torch.int64)
samples = mvm.sample(field, noise, condition=wanted, guidance=Negative(SCALE, away=0))

# Classes of equal covariance: the guided law is the Gaussian around this mean, and the ODE takes noise z to it + STD z.
mean = MEANS[0] + SCALE * (MEANS[1] - MEANS[0])
error = (samples - (mean + STD * noise)).abs().max().item()
print(f"mean {samples.mean(0).numpy().round(3)}, exact {mean.numpy()}; largest error of a sample {error:.1e}")
