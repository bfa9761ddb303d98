"""What is installed with mvm, from the packages' own metadata: `supply.py licences FILE`, `supply.py sbom FILE`.

The bill of materials is written by hand: a generator would be one more package to trust, for sixty lines of JSON.
"""

import json
import re
import sys
import uuid
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any, NamedTuple

from mvm import __version__
from mvm.options import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 60  # of a licence's name; what is longer is its text

# Spellings of the metadata -> SPDX, where the spelling leaves no doubt.
SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "Apache Software License 2.0": "Apache-2.0",
    "BSD 2-Clause License": "BSD-2-Clause",
    "ISC License": "ISC",
    "ISC license": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
# Packages whose metadata name no licence and whose file has no title: what its text is, read at the pinned version.
READ = {"torchao": "BSD-3-Clause"}
NOT_SPDX = ("BSD", "BSD License", "Python Software Foundation License")

# Copyleft licences that bind more than the files they came with; a package under one needs a reason to be here.
COPYLEFT = re.compile(r"\b(AGPL|GPL|LGPL|SSPL|EUPL|CC-BY-SA|CC-BY-NC)")
EXCEPTIONS = {"codespell": "a spelling checker that developers run as a command; mvm neither imports nor ships it"}

HEAD = """# Licences

mvm itself is Apache-2.0 (`LICENSE`). These are the packages it is developed and tested with, as pinned in
`constraints.txt`: all that `pip install -e '.[dev]'` installs. A user's installation holds a part of them. Licences are
as the packages' metadata name them, or as their text says. Made by `make licences`; a test says when it is not current.

| package | version | licence |
|---|---|---|
"""
TAIL = """
MPL-2.0 binds changes to a package's own files, not what uses it. Licences that would bind more, and why they may stay:

| package | reason |
|---|---|
"""


class Package(NamedTuple):
    """A pinned package as it is installed."""

    name: str
    version: str
    licence: str
    needs: tuple[str, ...]

    @property
    def purl(self) -> str:
        """Return the package's address in the form that scanners look up."""
        return f"pkg:pypi/{self.name}@{self.version}"


def canonical(name: str) -> str:
    """Return a project's name as the package index compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path = ROOT / "constraints.txt") -> dict[str, str]:
    """Return name -> version of all that is pinned."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {canonical(name): version for name, version in (line.split("==") for line in lines)}


def _file_title(found: Distribution) -> str:
    """Return the first line of a package's licence file."""
    for file in found.files or ():
        if file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING")):
            return next((line.strip() for line in file.read_text().splitlines() if line.strip()), "")
    return ""


def licence(found: Distribution) -> str:
    """Return a package's licence: its expression, its name, its classifiers, or the title of its file."""
    facts = found.metadata
    classified = [
        c.split(" :: ")[-1] for c in facts.get_all("Classifier") or [] if c.startswith("License :: OSI Approved ::")
    ]
    short = (facts.get("License") or "").strip()
    short = short if short != "UNKNOWN" and "\n" not in short and len(short) <= LONGEST else ""
    name = facts.get("License-Expression") or short or " AND ".join(classified) or _file_title(found)
    return SPDX.get(name, name)


def packages() -> list[Package]:
    """Return all pinned packages by name; one that is not installed, or in another version, is an error."""
    known, out = pins(), []
    for name, version in sorted(known.items()):
        found = distribution(name)
        if found.version.split("+")[0] != version:  # +cpu: the build of torch
            raise ValueError(f"{name} {found.version} is installed, constraints.txt pins {version}; run: make lint")
        asked = (line for line in found.requires or () if "extra ==" not in line)
        names = {canonical(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in asked}
        needs = tuple(sorted(names & known.keys()))  # of the pinned packages
        out.append(Package(name, version, READ.get(name) or licence(found), needs))
    return out


def licences_page(found: list[Package]) -> str:
    """Return docs/reference/licences.md."""
    rows = "".join(f"| {p.name} | {p.version} | {p.licence} |\n" for p in found)
    return HEAD + rows + TAIL + "".join(f"| {name} | {reason} |\n" for name, reason in EXCEPTIONS.items())


def _component(package: Package) -> dict[str, Any]:
    named = package.licence in NOT_SPDX
    return {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "purl": package.purl,
        "licenses": [{"license": {"name": package.licence}} if named else {"expression": package.licence}],
    }


def bill(found: list[Package]) -> dict[str, Any]:
    """Return the software bill of materials, CycloneDX 1.6; equal packages give an equal bill, to the last digit."""
    own = Package(DISTRIBUTION, __version__, "Apache-2.0", tuple(p.name for p in found))
    addresses = {p.name: p.purl for p in found}
    serial = uuid.uuid5(uuid.NAMESPACE_URL, " ".join([own.purl, *addresses.values()]))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": _component(own)},
        "components": [_component(p) for p in found],
        "dependencies": [{"ref": p.purl, "dependsOn": [addresses[n] for n in p.needs]} for p in (own, *found)],
    }


def main(what: str, target: str) -> None:
    """Write one of the two."""
    found = packages()
    text = licences_page(found) if what == "licences" else json.dumps(bill(found), indent=2) + "\n"
    Path(target).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("licences", "sbom"):
        sys.exit("usage: supply.py licences|sbom FILE")
    main(*sys.argv[1:])
