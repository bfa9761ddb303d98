"""benchmarks/seen_and_unseen.py and copies.py: errors on images seen and unseen, and copies among samples."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from programs import imported

from mvm.path import LinearFlow, MeanVelocity, TimeLaw

pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")


# ---- seen_and_unseen


@pytest.fixture(scope="module")
def seen():
    return imported("seen_and_unseen")


def answering(answer):
    """A model whose guess of x0 is a function of x, on flow matching's path."""
    model = lambda x, t: answer(x)  # noqa: E731
    model.schedule, model.recipe = LinearFlow(), SimpleNamespace(name="x")
    return model


def test_errors_are_of_u_whatever_the_path(seen):
    lams = seen.log_snrs(TimeLaw("lam-normal", 0.5, 1.5), 4)
    assert torch.all(lams.diff() < 0)
    assert float(lams.mean()) == pytest.approx(0.5)
    images = torch.full((5, 3, 2, 2), 0.5)
    found = seen.errors(answering(torch.zeros_like), images, lams, batch=2)
    torch.testing.assert_close(found, (0.25 / MeanVelocity().t_from_lam(lams)).expand(5, 4), rtol=1e-6, atol=0)
    assert float(seen.errors(answering(lambda x: torch.full_like(x, 0.5)), images, lams).max()) == 0
    once, again = (seen.errors(answering(torch.tanh), images, lams, batch=batch) for batch in (2, 5))
    assert torch.equal(once, again)  # noise is an image's own


def test_a_control_takes_out_how_hard_images_are(seen):
    torch.manual_seed(0)
    hard = [torch.rand(400, 6).add(0.1).double() for _ in range(2)]  # errors of any model on train and test images
    overfit = [hard[0] * 0.9, hard[1]]
    lams = torch.arange(6.0).flip(0)
    plain, controlled = (seen.table(overfit, control, lams).splitlines() for control in (None, hard))
    assert controlled[2] == f"| +0.00 to +5.00 | {math.log(1 / 0.9):+.4f} (+0.1054 to +0.1054) |"
    assert [line.split(" | ")[0] for line in controlled[3:]] == [
        "| +4.00 to +5.00",
        "| +2.00 to +3.00",
        "| +0.00 to +1.00",
    ]
    assert "(+0.1054 to +0.1054)" not in plain[2]


# ---- copies


@pytest.fixture(scope="module")
def copies():
    return imported("copies")


def photographs(count, seed):
    return torch.randint(256, (count, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_a_copy_is_found_also_when_mirrored(copies, monkeypatch):
    monkeypatch.setattr(copies, "PART", 7)  # parts that do not divide the images
    training = photographs(30, 0)
    images = torch.cat((training[11:12], training[23:24].flip(-1), photographs(3, 1)))
    found = copies.neighbours(images, training, k=5)
    assert found.numbers[:2, 0].tolist() == [11, 30 + 23]
    assert found.ratios[:2].tolist() == [0, 0]
    assert torch.equal(copies.originals(training, found.numbers[:2, 0]), images[:2])
    every = torch.cat((training, training.flip(-1))).double().flatten(1)
    want = torch.stack([(every - x).square().mean(1).sqrt() for x in images.double().flatten(1)])
    torch.testing.assert_close(found.distances.double(), want.sort(1).values[:, :5], rtol=1e-5, atol=1e-5)


def test_copies_far_from_grey_have_a_distance_of_nothing(copies):
    """By norms and products, in float32, large pixels would leave a copy some way off."""
    bright = torch.full((2, 3, 32, 32), 251, dtype=torch.uint8)
    bright[1, 0] = 7
    assert copies.neighbours(bright, bright, k=2).distances[:, 0].tolist() == [0, 0]


def near(copies, ratios):
    """Neighbours of such ratios, whose nearest are twice as far."""
    ratios = torch.as_tensor(ratios)
    return copies.Neighbours(torch.stack((2 * ratios, torch.full_like(ratios, 1), torch.full_like(ratios, 3)), 1), None)


def test_a_ratio_is_of_the_nearest_to_the_mean_of_the_others(copies):
    assert copies.Neighbours(torch.tensor([[2.0, 3.0, 5.0]]), None).ratios.tolist() == [0.5]
    assert near(copies, [0.25]).ratios.tolist() == [0.25]


def test_the_table_of_copies_counts_those_nearer_than_photographs_are(copies):
    photos = near(copies, torch.linspace(0, 1, 21))  # one in twenty lies below 0.05, one in four below 0.25
    samples = near(copies, [0.01, 0.02, 0.04, 0.2, 0.3, 0.6, 0.7, 0.8, 0.9, 0.95])
    assert copies.table(samples, photos).splitlines() == [
        "| images | number | nearest, median | ratio, median | smallest | below 0.050 | below 0.250 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| samples | 10 | 0.6 | 0.300 | 0.010 | 3 (30.0%; 10.8% to 60.3%) | 4 (40.0%; 16.8% to 68.7%) |",
        "| held out | 21 | 1.0 | 0.500 | 0.000 | 1 (4.8%; 0.8% to 22.7%) | 5 (23.8%; 10.6% to 45.1%) |",
    ]
    assert copies.table(samples, None).splitlines()[-1] == "| samples | 10 | 0.6 | 0.300 | 0.010 |"


def test_a_share_has_wilson_s_interval(copies):
    assert copies.share(0, 100) == "0 (0.0%; 0.0% to 3.7%)"
    assert copies.share(5, 100) == "5 (5.0%; 2.2% to 11.2%)"


def cells(picture, size, gap, columns):
    """The images (rows, columns, H, W, 3) at the end of a picture, as they were before they were magnified by two."""
    body = np.asarray(picture)[-(2 * (size + gap) + gap) :, -(columns * (size + gap) + gap) :]
    corners = [[(gap + r * (size + gap), gap + c * (size + gap)) for c in range(columns)] for r in range(2)]
    return np.array([[body[y : y + size : 2, x : x + size : 2] for y, x in row] for row in corners])


def test_the_worst_are_shown_above_their_nearest(copies):
    training, samples = photographs(12, 0), photographs(4, 1)
    samples[2] = training[5].flip(-1)
    found = copies.neighbours(samples, training, k=3)
    order = found.ratios.argsort()
    shown = cells(copies.worst(samples, training, found), 8, copies.GAP, 4)
    assert order[0] == 2
    assert (shown[0] == samples[order].permute(0, 2, 3, 1).numpy()).all()
    assert (shown[1, 0] == shown[0, 0]).all()
    assert (shown[1, 1:] == copies.originals(training, found.numbers[order[1:], 0]).permute(0, 2, 3, 1).numpy()).all()


def test_copies_are_looked_for_in_files(copies, tmp_path, monkeypatch, capsys):
    from mvm.data.prepare import prepare

    photos = photographs(60, 0).repeat_interleave(2, -1).repeat_interleave(2, -2)
    (tmp_path / "source" / "a").mkdir(parents=True)
    for number, image in enumerate(photos):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / "source" / "a" / f"{number:02}.png")
    prepare(tmp_path / "source", tmp_path / "data", size=8, progress=False)
    others = torch.randint(256, (30, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    copied = photos[7:9].permute(0, 2, 3, 1).numpy()
    np.savez(tmp_path / "s.npz", arr_0=copied)
    np.savez(tmp_path / "p.npz", images=others.numpy())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["x", "s.npz", "--data", "data", "--held-out", "p.npz", "--out", "n.png"])
    copies.main()
    assert "| samples | 2 | 0.0 | 0.000 | 0.000 | 2 (100.0%; 34.2% to 100.0%) |" in capsys.readouterr().out
    assert (cells(Image.open("n.png"), 16, copies.GAP, 2)[0] == copied).all()
    with pytest.raises(ValueError, match=r"images are \[3, 4, 4\], the training images \[3, 8, 8\]"):
        copies.neighbours(photographs(1, 0), photos)
