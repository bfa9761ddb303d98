"""Another library's FID and KID on the same network and images."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mvm.evaluation.evaluate import ComparedSet, Judge, evaluate
from mvm.evaluation.images import of_tensor
from mvm.metrics.distances import kernel_distance
from mvm.metrics.extractors import EXTRACTORS, Extractor
from mvm.metrics.measures import Key
from mvm.metrics.weights import load_inception

fid = pytest.importorskip("torchmetrics.image.fid", reason="torchmetrics is not installed")
kid = pytest.importorskip("torchmetrics.image.kid", reason="torchmetrics is not installed")

ASSETS = Path(os.environ.get("MVM_ASSETS", "no assets")) / "inception"
POOL = Key("inception", "pool")


class Random(nn.Module):
    """A fixed random network: pixels -> 24 features; far from zero (offset), careless sums lose digits."""

    num_features = 24

    def __init__(self, offset=30):
        super().__init__()
        self.offset, draw = offset, torch.Generator().manual_seed(0)
        self.register_buffer("weight", torch.randn(3 * 8 * 8, self.num_features, generator=draw) / 20)

    def forward(self, images):
        return self.offset + torch.tanh(images.float().flatten(1) / 255 @ self.weight)


class Pool(nn.Module):
    """FID's network as torchmetrics wants one: images -> one tensor."""

    num_features = 2048

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        return self.network(images).pool


def pictures(count, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, 8, 8), generator=draw, dtype=torch.uint8) // (1 + seed)


def their_moments(metric, real):
    kind = "real" if real else "fake"
    total, count = getattr(metric, f"{kind}_features_sum"), getattr(metric, f"{kind}_features_num_samples")
    mean = total / count
    return mean, (getattr(metric, f"{kind}_features_cov_sum") - count * torch.outer(mean, mean)) / (count - 1)


def check(network, a, b, batch, within):
    """Moments within 1e-6 of torchmetrics' (which subtracts products of means in float64), and the FID."""
    theirs = fid.FrechetInceptionDistance(feature=network)
    for images, real in ((a, False), (b, True)):
        for part in images.split(batch):
            theirs.update(part, real=real)
    judge = Judge(batch=batch, progress=False)
    for images, real in ((a, False), (b, True)):
        ours = judge.gather(of_tensor(images), {POOL: False}).moments(POOL)
        mean, covariance = their_moments(theirs, real)
        assert torch.allclose(ours.mean, mean, rtol=1e-6, atol=1e-6)
        assert torch.allclose(ours.covariance, covariance, rtol=1e-6, atol=1e-6)
    found = (
        evaluate(judge, ComparedSet("a", of_tensor(a)), ComparedSet("b", of_tensor(b)), ("fid",)).metrics["fid"].value
    )
    assert found == pytest.approx(float(theirs.compute()), abs=within)


def stand_in(monkeypatch, network):
    extractor = Extractor("inception", lambda images: {"pool": network(images)}, torch.device("cpu"))
    monkeypatch.setitem(EXTRACTORS, "inception", lambda sources, device: extractor)


def test_moments_and_fid(monkeypatch):
    network = Random()
    stand_in(monkeypatch, network)
    check(network, pictures(300, 0), pictures(200, 1), 64, within=1e-5)


@pytest.mark.filterwarnings("ignore:Metric `Kernel Inception Distance`")
def test_kid():
    network, a, b = Random(offset=0), pictures(60, 0), pictures(60, 1)
    theirs = kid.KernelInceptionDistance(feature=network, subsets=3, subset_size=60)  # all: no draw decides
    theirs.update(a, real=False)
    theirs.update(b, real=True)
    ours = kernel_distance(network(a), network(b), subsets=1, size=60).mean
    assert ours == pytest.approx(float(theirs.compute()[0]), rel=1e-5, abs=1e-5)  # theirs is in float32


@pytest.mark.slow
@pytest.mark.skipif(not ASSETS.is_dir(), reason="MVM_ASSETS names no folder with inception/")
def test_the_fid_network_itself(monkeypatch):
    network = Pool(load_inception(ASSETS))
    stand_in(monkeypatch, network)
    golden = np.load(ASSETS / "golden-256.npz")
    a, b = (torch.from_numpy(golden[name][:40]).permute(0, 3, 1, 2) for name in ("train", "test"))
    check(network, a, b, 20, within=1e-3)
