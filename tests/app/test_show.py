"""What the page shows: every word escaped, every picture inside the page, nothing to fetch."""

import base64
import io
import re

import torch
from PIL import Image

from mvm.app.form import ODE, SampleForm
from mvm.app.show import chosen, figures_html, film_html, no_side, problem_html, side_html
from mvm.app.walk import Look, SideRun, Still
from mvm.recipes import SampleConfig

FRAMES = [[b"a", b"b"], [b"c", b"d"]]  # of two steps, a picture of each side


def side(channels, steps=3, index=3, count=2):
    images = torch.arange(count * channels * 16).reshape(count, channels, 4, 4).to(torch.uint8)
    path = [Still(1 - step / steps, images[0], images[0]) for step in range(index + 1)]
    labels = torch.arange(count)
    return SideRun(SampleConfig(nfe=steps), labels, images, steps, index, index, 2 * index, 1.5, path)


def shown(page):
    """Return the pictures in the page."""
    found = re.findall(r'<img src="data:image/png;base64,([^"]+)"', page)
    return [Image.open(io.BytesIO(base64.b64decode(content))) for content in found]


def test_grey_and_colour_pictures_stand_above_their_classes():
    for channels, mode in ((1, "L"), (3, "RGB")):
        page = side_html(ODE, SampleForm("m", seed="7"), side(channels), ["cat", "a <b>"])
        assert {picture.mode for picture in shown(page)} == {mode}
        assert len(shown(page)) == 2 + 2 * 4
        assert "class cat, seed 7" in page
        assert "class a &lt;b&gt;, seed 8" in page
        assert "<b>" not in page
        assert 'download="m-seed-7-ode.png"' in page


def test_a_side_on_its_way_tells_how_far_it_is():
    page = side_html(ODE, SampleForm("m"), side(1, index=2), ["a", "b"])
    assert "step 2 of 3" in page
    assert "download" not in page


def test_a_long_way_is_thinned_out_between_its_ends():
    stills = [Still(float(step), torch.zeros(1), torch.zeros(1)) for step in range(101)]
    found = [still.t for still in chosen(stills, 5)]
    assert found == [0, 25, 50, 75, 100]
    assert chosen(stills[:3], 5) == stills[:3]


def test_figures_tell_cost_and_distance():
    one, other = side(1), side(1)
    other.images = one.images + 4
    page = figures_html(Look({"ODE": one, "SDE": other}, one))
    assert "<tr><th>network passes</th><td>6</td><td>6</td></tr>" in page
    assert "<tr><th>seconds</th><td>1.50</td><td>1.50</td></tr>" in page
    assert "<td>0.0 of 255</td><td>4.0 of 255</td>" in page
    assert "<b>4.0</b> grey levels of 255" in page


def test_distances_wait_for_what_is_not_there_yet():
    page = figures_html(Look({"ODE": side(1)}, side(1, index=1)))
    assert "step 1 of 3" in page
    assert "RMS distance between" not in page


def test_words_are_escaped():
    assert problem_html("<script>") == '<p class="mvm-problem" role="alert">&lt;script&gt;</p>'
    assert problem_html("") == ""
    assert "The solver heun solves the ODE alone" in no_side(SampleForm("m", solver="heun"))


def test_a_film_shows_its_last_frame_and_has_a_slider_when_done():
    running, done = film_html(FRAMES, False), film_html(FRAMES, True)
    assert running.count("<img") == 2
    assert "<input" not in running
    assert done.count("<img") == 4
    assert done.count(" hidden>") == 1
    assert 'max="1" value="1"' in done
