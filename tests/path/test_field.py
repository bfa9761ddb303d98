"""The equal-SNR bridge between schedules, on an oracle that knows the answer under each."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mvm.oracle import mixture
from mvm.path import (
    LinearFlow,
    MeanVelocity,
    PairedField,
    VariancePreserving,
    equal_snr,
    equal_snr_scale,
    equal_snr_time,
    full_time,
)

SCHEDULES = [MeanVelocity(), MeanVelocity(2.5), LinearFlow(), VariancePreserving()]


def small():
    means = torch.randn(3, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return mixture(means, torch.tensor([0.2, 0.5, 0.05]), labels=torch.tensor([0, 1, 1]))


@settings(max_examples=80, deadline=None)
@given(st.floats(1e-4, 0.9999), st.sampled_from(SCHEDULES), st.sampled_from(SCHEDULES))
def test_equal_snr_time_and_scale(part, source, target):
    t = part * source.end
    if source != target and isinstance(target, VariancePreserving) and float(source.lam(t)) < float(target.lam(1.0)):
        return  # noisier than this schedule ever is
    other = equal_snr_time(t, source, target)
    c = float(equal_snr_scale(t, source, target))
    # both coefficients must scale alike: c (alpha, sigma) of the source is (alpha, sigma) of the target
    assert c * float(source.alpha(t)) == pytest.approx(float(target.alpha(other)), rel=1e-8, abs=1e-12)
    assert c * float(source.sigma(t)) == pytest.approx(float(target.sigma(other)), rel=1e-8, abs=1e-12)


def test_flow_matching_time_by_hand():
    # r = (1 - s)/s and sqrt(t) = (-r + sqrt(r^2 + 4))/2
    for s in (0.1, 0.5, 0.8):
        r = (1 - s) / s
        root = (-r + math.sqrt(r * r + 4)) / 2
        assert float(equal_snr_time(s, LinearFlow(), MeanVelocity())) == pytest.approx(root**2, rel=1e-12)
    assert float(equal_snr_time(1.0, LinearFlow(), MeanVelocity())) == 1
    assert float(equal_snr_time(0.0, LinearFlow(), MeanVelocity())) == 0
    assert float(equal_snr_time(0.4, MeanVelocity(), MeanVelocity(2.5))) == pytest.approx(1.0)


@pytest.mark.parametrize("source", SCHEDULES, ids=str)
@pytest.mark.parametrize("target", SCHEDULES, ids=str)
def test_mapped_field_is_the_oracle_of_the_target(source, target):
    oracle = small()
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    t = torch.tensor([0.01, 0.2, 0.5, 0.8, 0.95], dtype=torch.float64) * target.end
    condition = torch.tensor([0, 1, 1, 0, 1])
    mapped = equal_snr(oracle.field(source), source, target)
    torch.testing.assert_close(mapped(x, t), oracle.denoise(x, t, target), rtol=1e-9, atol=1e-9)
    got = mapped(x, t, condition)
    torch.testing.assert_close(got, oracle.denoise(x, t, target, condition), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("source", SCHEDULES, ids=str)
@pytest.mark.parametrize("target", [MeanVelocity(), LinearFlow()], ids=str)
@pytest.mark.parametrize("end", [0.0, 1.0])
def test_mapped_field_is_finite_at_both_ends(source, target, end):
    x = torch.randn(2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    t = torch.full((2,), end * target.end, dtype=torch.float64)
    got = equal_snr(small().field(source), source, target)(x, t, None)
    # VP stops short of pure noise: there the nearest it has, alpha(1) = 0.0066
    close = 0.02 if isinstance(source, VariancePreserving) else 1e-9
    torch.testing.assert_close(got, small().denoise(x, t, target), rtol=0, atol=close)


def test_full_time():
    t = full_time(torch.zeros(3, 2, dtype=torch.float16), 0.1)
    assert t.dtype == torch.float64
    assert t.tolist() == [0.1] * 3


def test_paired_field_is_recognised():
    class Paired:
        def __call__(self, x, t, condition):
            return x

        def pair(self, x, t, condition):
            return x, x

    assert isinstance(Paired(), PairedField)
    assert not isinstance(small().field(MeanVelocity()), PairedField)
