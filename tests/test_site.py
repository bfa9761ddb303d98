"""The documentation site: it builds without a warning, shows every public name, and opens from the disk, offline."""

import importlib
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parent.parent
pytest.importorskip("mkdocs", reason="the site is built by MkDocs")
SPEC = importlib.util.spec_from_file_location("site_pages", ROOT / "tools" / "site.py")
site_pages = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(site_pages)


def everything() -> Iterator[tuple[str, str]]:
    for name in site_pages.MODULES:
        yield from ((name, public) for public in site_pages.public_names(name))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    silent = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=silent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_public_name_appears(site):
    pages = {name: (site / f"reference/api/{name}.html").read_text("utf-8") for name in site_pages.MODULES}
    assert not [f"{module}.{name}" for module, name in everything() if f'id="{module}.{name}"' not in pages[module]]


def test_reference_names_every_command_and_option(site):
    from mvm.cli import app
    from mvm.recipes import load_recipe
    from mvm.recipes.docs import option_docs

    commands = (site / "reference/command-line.html").read_text("utf-8")
    assert not [name for name in app if not name.startswith("-") and f'id="mvm-{name}"' not in commands]
    options = (site / "reference/recipe-options.html").read_text("utf-8")
    assert not [
        name for name in option_docs(load_recipe("imagenette-ddt-clip")) if f"<code>{name}</code>" not in options
    ]


def has_words(value: object) -> bool:
    """Whether a function or class has words of its own; a dataclass without any gets its signature for them."""
    words = inspect.getdoc(value) or ""
    return bool(words) and not words.startswith(f"{getattr(value, '__name__', '')}(")


def test_every_function_and_class_has_a_docstring():
    values = [(f"{module}.{name}", getattr(importlib.import_module(module), name)) for module, name in everything()]
    checked = [(name, value) for name, value in values if inspect.isclass(value) or inspect.isfunction(value)]
    assert len(checked) > 100
    assert not [name for name, value in checked if not has_words(value)]


def test_every_module_has_a_docstring():
    assert all(importlib.import_module(name).__doc__ for name in site_pages.MODULES)


def test_pages_ask_nothing_of_the_network(site):
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'<(script|link|img|iframe)[^>]*(src|href)="(https?:)?//', text.replace(CANONICAL, "")), (
            path
        )
        assert "url(http" not in text, path


def test_all_that_pages_load_is_there(site):
    for path in site.rglob("*.html"):
        text = re.sub(r"<(code|pre).*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        loaded = re.findall(r'<(?:script|img)[^>]* src="([^":?#]+)', text)
        loaded += re.findall(r'<link rel="(?:stylesheet|icon)" href="([^":?#]+)', text)
        missing = [name for name in loaded if path.name != "404.html" and not (path.parent / unquote(name)).is_file()]
        assert not missing, (path, missing)


CANONICAL = '<link rel="canonical" href="'  # an address, not something that is loaded


def test_opens_offline_in_a_browser(site):
    """By file://: search finds, formulas are drawn, nothing is asked of the network, nothing is complained of."""
    play = pytest.importorskip("playwright.sync_api", reason="the browser test needs playwright").sync_playwright
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("the browser test needs chromium on the PATH (Debian: apt install chromium)")
    asked, complaints = [], []
    with play() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light")):
            view = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
            view.on("request", lambda request: asked.append(request.url))
            view.on("pageerror", lambda error: complaints.append(str(error)))
            view.goto((site / "explanation/method.html").as_uri())
            view.wait_for_selector(".katex")
            assert view.evaluate("document.documentElement.scrollWidth") <= width
            assert view.evaluate("document.body.dataset.mdColorScheme") == {"light": "default", "dark": "slate"}[scheme]
        view = browser.new_page()
        view.on("request", lambda request: asked.append(request.url))
        view.goto((site / "index.html").as_uri())
        view.click(".md-search__input")
        view.keyboard.type("guidance interval")
        view.wait_for_selector(".md-search-result__link")
        browser.close()
    assert not complaints
    assert asked
    assert all(url.startswith(("file:", "data:", "blob:")) for url in asked), asked
