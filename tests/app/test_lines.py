"""The lines shown are true: run, they write the file that the page saves, byte for byte."""

import base64
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from mvm.app.form import ODE, SDE, SampleForm
from mvm.app.lines import command, file_name, number, python
from mvm.app.show import side_html
from mvm.app.walk import look
from mvm.cli import run
from mvm.model import load

GUIDED = SampleForm("digits", (3, 5), 3, "11", "adams", 4, 0.75, cfg=1.5, low=0.1, high=0.9)
FORMS = [
    (SampleForm("digits", nfe=3), SDE),
    (GUIDED, ODE),
    (GUIDED, SDE),
    (SampleForm("digits", nfe=4, solver="heun"), ODE),
]


def saved(model, form, side, auto=None):
    """Return name and bytes of what the link on the page saves."""
    *_, found = look(model, form, auto=auto)
    page = side_html(side, form, found.sides[side], model.classes)
    name, content = re.search(r'download="([^"]+)" href="data:image/png;base64,([^"]+)"', page).groups()
    return name, base64.b64decode(content)


def check_lines(model, form, side, folder, auto=None):
    """Check that command and Python lines write what the page saves; return that."""
    name, content = saved(model, form, side, auto)
    words = shlex.split(command(form, side, model))
    assert words[0] == "mvm"
    assert run(words[1:]) == 0
    assert (folder / name).read_bytes() == content
    (folder / name).unlink()
    exec(compile(python(form, side, model), "shown", "exec"), {})
    assert (folder / name).read_bytes() == content
    return content


@pytest.mark.parametrize(("form", "side"), FORMS)
def test_command_and_python_write_the_saved_picture(digits, form, side, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_lines(digits, form, side, tmp_path)


def test_internal_guidance_is_in_the_lines(inner, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, plain = load(inner), SampleForm(inner, nfe=3)
    pictures = {
        check_lines(model, replace(plain, cfg=cfg, internal=internal, low=low), ODE, tmp_path)
        for cfg, internal, low in ((1.0, 1.0, 0.0), (1.0, 4.0, 0.0), (1.0, 4.0, 0.5), (2.0, 4.0, 0.0))
    }
    assert len(pictures) == 4


def test_autoguidance_is_in_the_lines(digits, inner, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    form = SampleForm("digits", nfe=3, auto=inner, auto_scale=1.5)
    guided = check_lines(digits, form, ODE, tmp_path, load(inner))
    assert guided != check_lines(digits, replace(form, auto_scale=1.0), ODE, tmp_path, load(inner))


def test_the_lines_run_in_a_process_of_their_own(digits, tmp_path):
    name, content = saved(digits, GUIDED, SDE)
    (tmp_path / "again.py").write_text(python(GUIDED, SDE, digits))
    subprocess.run([sys.executable, "again.py"], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / name).read_bytes() == content


def test_the_command_in_full(digits):
    assert command(GUIDED, SDE, digits) == (
        "mvm sample digits --num 3 --classes 3,5 --seed 11 --solver adams --nfe 4 --rho 0.75 --cfg 1.5 "
        "--interval 0.1,0.9 --out digits-seed-11-sde.png"
    )


def test_the_python_lines_in_full(digits):
    assert python(GUIDED, SDE, digits) == (
        "import mvm\n\n"
        "images = mvm.load('digits').generate(num=3, classes=[3, 5], seed=11, solver='adams', nfe=4, rho=0.75, "
        "cfg=1.5, interval=[0.1, 0.9])\n"
        "images.save('digits-seed-11-sde.png')\n"
    )


def test_what_a_recipe_has_beyond_the_page_is_undone(digits, monkeypatch):
    recipe = replace(digits.recipe, sample=replace(digits.recipe.sample, share=0.5))
    monkeypatch.setattr(digits, "recipe", recipe)
    assert "--share 0" in command(GUIDED, ODE, digits)


def test_names_with_spaces_are_quoted(digits):
    form = SampleForm("my runs/a b")
    assert command(form, ODE, digits).startswith("mvm sample 'my runs/a b' --num 4 ")
    assert file_name(form, ODE) == "a b-seed-0-ode.png"


def test_numbers_keep_all_their_digits():
    assert [number(value) for value in (1.0, 0.75, 0.1 + 0.2)] == ["1", "0.75", "0.30000000000000004"]
