"""Particles on the plane go to the exact law; frames show them where they are."""

import io

import pytest
import torch
from PIL import Image

from mvm.app import plane
from mvm.app.form import ODE, SDE
from mvm.app.plane import LAWS, PARTICLES, PlaneForm, exact_score, law_named, log_density_score, scenes
from mvm.oracle import mixture


def last(law, form):
    *_, scene = scenes(law, form)
    return scene


@pytest.mark.parametrize("name", list(LAWS))
@pytest.mark.parametrize("side", [ODE, SDE])
def test_particles_reach_the_law(name, side):
    law = law_named(name)
    points = last(law, PlaneForm(name, nfe=40)).paths[side][-1]
    found, wanted = log_density_score(law, points), exact_score(law)
    assert abs(found.mean - wanted.mean) < 4 * found.error


def test_both_sides_start_at_the_same_points_and_take_every_step():
    scene = last(law_named("spiral"), PlaneForm("spiral", nfe=5))
    assert torch.equal(scene.paths[ODE][0], scene.paths[SDE][0])
    assert not torch.equal(scene.paths[ODE][-1], scene.paths[SDE][-1])
    assert len(scene.times) == scene.steps + 1 == 6
    assert scene.times[0] == 1 > scene.times[1] > scene.times[-1] == 0
    assert scene.paths[ODE][0].shape == (PARTICLES, 2)


def test_an_ode_solver_has_one_side():
    scene = last(law_named("two moons"), PlaneForm("two moons", "heun", nfe=4))
    assert list(scene.paths) == [ODE]
    assert plane.frame(law_named("two moons"), scene, 0, ODE).size == (plane.SIDE, plane.HEAD + plane.SIDE)


@pytest.mark.parametrize(("field", "value"), [("nfe", 0), ("nfe", 101), ("rho", -1), ("seed", "x")])
def test_odd_values_are_told(field, value):
    assert list(PlaneForm(**{field: value}).problems()) == [field]
    assert PlaneForm().problems() == {}


def test_an_unknown_law_is_told():
    with pytest.raises(ValueError, match="law='rings' is unknown"):
        law_named("rings")


def test_the_density_is_darkest_where_it_is_highest():
    law = mixture(torch.tensor([[1.4, 1.4]]), 0.1)  # right of the middle, above it
    grey = plane.density(law, 0.0).convert("L")
    side = plane.SIDE * plane.SHARP
    assert grey.getpixel((side * 3 // 4, side // 4)) <= plane.DARKEST + 2
    assert grey.getpixel((side // 4, side * 3 // 4)) == 255


def test_a_particle_is_drawn_where_it_is():
    law = mixture(torch.zeros(1, 2), 0.1)
    points = torch.full((PARTICLES, 2), 1.4, dtype=torch.float64)
    picture = plane.panel(law, 0.5, [points], SDE, arrows=False)
    assert picture.getpixel((plane.SIDE * 3 // 4, plane.SIDE // 4)) == plane.COLOURS[SDE]


def test_the_animation_has_all_frames_and_rests_at_its_end():
    law = law_named("eight on a ring")
    scene = last(law, PlaneForm(nfe=2))
    frames = [plane.side_by_side([plane.frame(law, scene, step, side) for side in (ODE, SDE)]) for step in range(3)]
    assert frames[0].size == (2 * plane.SIDE + plane.GAP, plane.HEAD + plane.SIDE)
    with Image.open(io.BytesIO(plane.webp(frames))) as found:
        assert (found.format, found.n_frames, found.size) == ("WEBP", 3, frames[0].size)
