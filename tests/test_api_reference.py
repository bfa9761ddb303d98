"""The API reference builds without a warning, shows every public name, and every function and class says what it is."""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = importlib.util.spec_from_file_location("build_api", ROOT / "docs" / "build_api.py")
assert SCRIPT is not None
assert SCRIPT.loader is not None
build_api = importlib.util.module_from_spec(SCRIPT)
SCRIPT.loader.exec_module(build_api)


def public_names(module: ModuleType) -> list[str]:
    """What `__all__` says; without one, the functions and classes that the module itself defines."""
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if name != "__version__"]
    defined = ((name, value) for name, value in vars(module).items() if not name.startswith("_"))
    return [name for name, value in defined if getattr(value, "__module__", "") == module.__name__]


def everything() -> Iterator[tuple[str, str]]:
    for name in build_api.MODULES:
        yield from ((name, public) for public in public_names(importlib.import_module(name)))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build_api.build(folder)
    return folder


def page(site: Path, module: str) -> str:
    return (site / f"{module.replace('.', '/')}.html").read_text(encoding="utf-8")


def test_every_module_has_a_page_and_no_other(site):
    found = {path.relative_to(site).with_suffix("").as_posix().replace("/", ".") for path in site.rglob("*.html")}
    assert found == {*build_api.MODULES, "index"}


def test_every_public_name_appears(site):
    pages = {module: page(site, module) for module in build_api.MODULES}
    missing = [
        f"{module}.{name}"
        for module, name in everything()
        if f'id="{name}"' not in pages[module] and f"{module}.{name}" not in build_api.MODULES
    ]
    assert not missing


def is_told(value: object) -> bool:
    """Whether a function or class has words of its own; a dataclass without any gets its signature for them."""
    told = inspect.getdoc(value) or ""
    return bool(told) and not told.startswith(f"{getattr(value, '__name__', '')}(")


def test_every_function_and_class_has_a_docstring():
    values = [(f"{module}.{name}", getattr(importlib.import_module(module), name)) for module, name in everything()]
    checked = [(name, value) for name, value in values if inspect.isclass(value) or inspect.isfunction(value)]
    assert len(checked) > 100
    assert not [name for name, value in checked if not is_told(value)]


def test_every_module_has_a_docstring():
    assert all(importlib.import_module(name).__doc__ for name in build_api.MODULES)


def test_pages_ask_nothing_of_the_network(site):
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'<(script|link|img|iframe)[^>]*(src|href)="(https?:)?//', text), path
        assert "url(http" not in text, path
