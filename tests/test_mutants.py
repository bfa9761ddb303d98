"""tools/mutants.py: every mutant is still of the code, and what it says of one that lives, dies or is not there."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tool():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        yield __import__("mutants")  # processes that it starts find it, too


def test_every_mutant_is_of_the_code(tool):
    assert len(tool.MUTANTS) == len(set(tool.MUTANTS)) >= 36
    for mutant in tool.MUTANTS:
        assert mutant.new in tool.broken(mutant, ROOT / "src")
        assert all((ROOT / word).is_file() for word in tool.words(mutant.tests) if word.startswith("tests/"))


@pytest.mark.parametrize(
    ("file", "old"), [("noise.py", "no such line"), ("noise.py", "return"), ("no_such_file.py", "x")]
)
def test_a_mutant_whose_text_is_not_there_once_is_an_error(tool, file, old):
    with pytest.raises(ValueError, match=rf"{file}.*{old}.*not once"):
        tool.broken(tool.Mutant(file, old, "other", "test_noise.py"), ROOT / "src")


def test_tests_may_be_picked(tool):
    assert tool.words("a.py b/c.py") == ["tests/a.py", "tests/b/c.py"]
    assert tool.words("a.py -k 'x or y'") == ["tests/a.py", "-k", "x or y"]


def test_a_wrong_line_is_killed_and_a_harmless_one_survives(tool):
    """`_unit` without its half cell, and a sum turned round."""
    wrong = tool.Mutant("noise.py", "words.double() + 0.5", "words.double()", "test_noise.py -k centres")
    harmless = tool.Mutant("noise.py", "words.double() + 0.5", "0.5 + words.double()", "test_noise.py -k centres")
    before = (ROOT / "src" / "mvm" / "noise.py").read_text(encoding="utf-8")
    killed, survived = tool.run([wrong, harmless], jobs=1)
    assert (killed.fate, killed.told) == ("killed", "test_noise.py::test_uniforms_are_centres_of_cells")
    assert survived.fate == "survived"
    assert (ROOT / "src" / "mvm" / "noise.py").read_text(encoding="utf-8") == before
