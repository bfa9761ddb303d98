"""What is trained: the network and, for REPA, its projector, joined with the objective into one module."""

from torch import Tensor, nn

from mvm.objective import Batch, Loss, Matching, Projector

PROJECTOR = "projector."  # prefix of the projector's weights; the network's have none


class Learner(nn.Module):
    """learner(batch) -> Loss."""

    def __init__(self, network: nn.Module, objective: Matching, projector: Projector | None) -> None:
        super().__init__()
        self.network, self.projector = network, projector
        self.objective = objective

    def forward(self, batch: Batch) -> Loss:
        return self.objective(self.network, batch, self.projector)  # ty: ignore[invalid-argument-type]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return all parameters by the names that checkpoints use."""
        return [(name.removeprefix("network."), value) for name, value in self.named_parameters()]


def projector_weights(learner: Learner) -> dict[str, Tensor]:
    """Return the projector's parameters by name; empty without one."""
    return {name: value for name, value in learner.named() if name.startswith(PROJECTOR)}
