"""Objectives: (network, batch) -> Loss. What varies between trainings lives here, never in the loop."""

from mvm.objective.auxiliary import Projector, RepaConfig
from mvm.objective.matching import WEIGHTS, Batch, Loss, Matching, ObjectiveConfig

__all__ = ["WEIGHTS", "Batch", "Loss", "Matching", "ObjectiveConfig", "Projector", "RepaConfig"]
