"""The Gaussian path between data and noise: schedules, prediction kinds, fields, training noise."""

from mvm.path.convert import KINDS, MEAN_VELOCITY_KINDS, NOISE_KINDS, Pair, convert, from_pair, to_pair, to_x0
from mvm.path.field import (
    Field,
    PairedField,
    TrainedField,
    equal_snr,
    equal_snr_scale,
    equal_snr_time,
    full_time,
    require_schedule,
)
from mvm.path.perturb import Noised, TimeLaw, perturb
from mvm.path.schedule import (
    MEAN_VELOCITY,
    SCHEDULES,
    LinearFlow,
    MeanVelocity,
    Schedule,
    VariancePreserving,
    as_time,
    like,
    schedule_named,
)

__all__ = [
    "KINDS",
    "MEAN_VELOCITY",
    "MEAN_VELOCITY_KINDS",
    "NOISE_KINDS",
    "SCHEDULES",
    "Field",
    "LinearFlow",
    "MeanVelocity",
    "Noised",
    "Pair",
    "PairedField",
    "Schedule",
    "TimeLaw",
    "TrainedField",
    "VariancePreserving",
    "as_time",
    "convert",
    "equal_snr",
    "equal_snr_scale",
    "equal_snr_time",
    "from_pair",
    "full_time",
    "like",
    "perturb",
    "require_schedule",
    "schedule_named",
    "to_pair",
    "to_x0",
]
