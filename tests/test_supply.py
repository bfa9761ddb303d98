"""Pins, licences and the bill of materials say what is installed: all of it, and no more."""

import importlib.util
import re
import tomllib
import uuid
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GPU_PARTS = ("nvidia-", "cuda-", "triton")  # come with torch's GPU builds, at the versions torch itself names


def load_tool():
    spec = importlib.util.spec_from_file_location("supply", ROOT / "tools" / "supply.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


supply = load_tool()


def own_requirements():
    """Return every requirement of every extra and of the build, but for mvm's own extras."""
    told = PROJECT["project"]
    extras = [line for lines in told["optional-dependencies"].values() for line in lines]
    asked = [Requirement(line) for line in (*told["dependencies"], *extras, *PROJECT["build-system"]["requires"])]
    return [one for one in asked if one.name != PROJECT["project"]["name"]]


def test_what_users_install_is_bounded_above():
    """By the next major release, or tighter; tools of developers are pinned alone."""
    told = PROJECT["project"]
    extras = [line for name, lines in told["optional-dependencies"].items() if name != "dev" for line in lines]
    for line in (*told["dependencies"], *extras):
        assert any(bound.operator == "<" for bound in Requirement(line).specifier), line


def reachable():
    """Return the names of all packages that the dev extra installs here, directly or not."""
    todo = [(canonicalize_name(one.name), frozenset(one.extras)) for one in own_requirements()]
    seen = set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen or name.startswith(GPU_PARTS):
            continue
        seen.add((name, extras))
        for line in distribution(name).requires or ():
            one = Requirement(line)
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                todo.append((canonicalize_name(one.name), frozenset(one.extras)))
    return {name for name, _ in seen}


def test_pins_are_what_the_dev_extra_installs():
    assert reachable() == set(supply.pins())


def test_pins_are_sorted_and_once():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    names = [canonicalize_name(line.split("==")[0]) for line in lines]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)


def test_every_requirement_has_a_lower_bound_that_the_pin_keeps():
    pinned = supply.pins()
    for one in own_requirements():
        assert any(part.operator == ">=" for part in one.specifier), f"{one} names no least version"
        assert one.specifier.contains(Version(pinned[canonicalize_name(one.name)])), f"{one}: another is pinned"


def test_the_page_of_licences_is_current():
    page = (ROOT / "docs" / "reference/licences.md").read_text()
    assert page == supply.licences_page(supply.packages()), "run: make licences"


def test_no_licence_forbids_use():
    found = {package.name: package.licence for package in supply.packages()}
    assert [name for name, told in found.items() if told.strip() in ("", "UNKNOWN")] == []
    assert {name for name, told in found.items() if supply.COPYLEFT.search(told)} == set(supply.EXCEPTIONS)


@pytest.mark.parametrize("name", ["GPL-3.0-or-later", "AGPL-3.0", "LGPL-2.1-only", "CC-BY-NC-4.0"])
def test_copyleft_is_known_by_name(name):
    assert supply.COPYLEFT.search(name)
    assert not supply.COPYLEFT.search("MPL-2.0 AND (Apache-2.0 OR MIT)")


def test_what_is_excepted_is_not_imported():
    names = "|".join(supply.EXCEPTIONS)
    files = (ROOT / "src").rglob("*.py")
    assert [p for p in files if re.search(rf"^\s*(import|from) ({names})", p.read_text(), re.M)] == []


@pytest.fixture(scope="module")
def bill():
    return supply.bill(supply.packages())


def test_the_bill_has_what_cyclonedx_requires(bill):
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert uuid.UUID(bill["serialNumber"].removeprefix("urn:uuid:"))
    assert bill["serialNumber"].startswith("urn:uuid:")
    for part in (bill["metadata"]["component"], *bill["components"]):
        assert part.keys() == {"type", "bom-ref", "name", "version", "purl", "licenses"}
        assert part["type"] == "library"
        assert re.fullmatch(r"pkg:pypi/[a-z0-9]+(-[a-z0-9]+)*@[0-9][\w.]*", part["purl"]), part["purl"]
        (entry,) = part["licenses"]
        assert entry.keys() in ({"expression"}, {"license"})


def test_names_of_the_bill_are_known_and_once(bill):
    names = [part["bom-ref"] for part in (bill["metadata"]["component"], *bill["components"])]
    assert len(names) == len(set(names))
    assert [entry["ref"] for entry in bill["dependencies"]] == names
    assert all(set(entry["dependsOn"]) <= set(names) for entry in bill["dependencies"])
    assert {part["name"]: part["version"] for part in bill["components"]} == supply.pins()


def test_expressions_are_spdx(bill):
    """Words of SPDX's grammar: identifiers, AND, OR, WITH, brackets; a name in free words stands as a name."""
    for part in bill["components"]:
        expression = part["licenses"][0].get("expression", "MIT")
        assert re.fullmatch(r"\(?[A-Za-z0-9.-]+( (AND|OR|WITH) \(?[A-Za-z0-9.-]+\)?)*", expression), part


def test_the_bill_is_the_same_every_time(bill):
    assert supply.bill(supply.packages()) == bill


def test_another_version_than_pinned_is_told(monkeypatch):
    monkeypatch.setattr(supply, "pins", lambda: {"numpy": "0.1"})
    with pytest.raises(ValueError, match=r"numpy .* is installed, constraints\.txt pins 0\.1"):
        supply.packages()
    monkeypatch.setattr(supply, "pins", lambda: {"no-such-package": "1"})
    with pytest.raises(PackageNotFoundError):
        supply.packages()
