"""Objectives: (network, batch) -> Loss. What varies between trainings lives here, never in the loop."""

from mvm.objective.matching import Batch, Loss, Matching, ObjectiveConfig
from mvm.objective.repa import Projector, RepaConfig
from mvm.objective.weights import WEIGHTS

__all__ = ["WEIGHTS", "Batch", "Loss", "Matching", "ObjectiveConfig", "Projector", "RepaConfig"]
