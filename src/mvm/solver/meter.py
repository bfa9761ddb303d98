"""What a sampler costs: a field that counts its evaluations and forward passes."""

from dataclasses import dataclass

from torch import Tensor

from mvm.path import Condition, Field, JoinedField, PairedField, joined_for


@dataclass
class Meter:
    """A field that counts: `evaluations` by the solver, `passes` of an image through the underlying field.

    It joins where that field does: one call for both answers, and still two passes, for an image goes through twice.
    """

    field: Field
    evaluations: int = 0
    passes: int = 0

    def __call__(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        self.passes += 1
        return self.field(x, t, condition)

    def joins(self, x: Tensor) -> bool:
        return joined_for(self.field, x)

    def both(self, x: Tensor, t: Tensor, condition: Condition) -> tuple[Tensor, Tensor]:
        assert isinstance(self.field, JoinedField)
        self.passes += 2
        return self.field.both(x, t, condition)

    def also(self, other: Field) -> Field:
        """Return another field whose passes count here too."""

        def counted(x: Tensor, t: Tensor, condition: Condition) -> Tensor:
            self.passes += 1
            return other(x, t, condition)

        return counted


@dataclass
class PairedMeter(Meter):
    """A Meter over a field with an inner head; a pair is one pass."""

    def pair(self, x: Tensor, t: Tensor, condition: Condition) -> tuple[Tensor, Tensor]:
        assert isinstance(self.field, PairedField)
        self.passes += 1
        return self.field.pair(x, t, condition)


def metered(field: Field) -> Meter:
    """Return the field with counters; it stays paired if it was."""
    return PairedMeter(field) if isinstance(field, PairedField) else Meter(field)
