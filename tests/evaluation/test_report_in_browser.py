"""The three reports in a real browser: no horizontal scrolling at a phone's width, legible in the dark."""

import shutil

import pytest
from test_run_report import line, make, recipe_of
from test_sweep_report import ODE, cell, curves

from mvm.demo import digits_section, distance_section, next_steps, path_section, shipped_section
from mvm.evaluation.report import Page, finding, table
from mvm.evaluation.run_report import write_run_report
from mvm.evaluation.sweep_report import write_report

sync_playwright = pytest.importorskip("playwright.sync_api", reason="the browser test needs playwright").sync_playwright
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("the browser test needs chromium on the PATH (Debian: apt install chromium)", allow_module_level=True)

LONG = "a-name-without-an-end" * 12
REPORTS = ("run", "sweep", "demo")


@pytest.fixture(scope="module")
def pages(tmp_path_factory, parts_of_a_demo):
    """The path of a page of each kind, with long names."""
    folder = tmp_path_factory.mktemp("pages")
    lines = [line(50 * i, 1 / i) for i in range(1, 40)] + [{"step": 100, "fd_pixels": 3.0}]
    run = make(folder / LONG[:200], recipe_of(train_steps="5000"), lines, [(1950, 3.0)], (100, 200))
    (folder / "sweep").mkdir()
    results = [*curves(ODE, (9.0, 8.0, 7.0, 3.0, 2.0)), *(cell(5, rho, cfg=1.5, low=0.6, high=0.8) for rho in (0, 1))]
    write_report(folder / "sweep", results, {"name": LONG, "images": 10, "command": LONG, "warnings": [LONG]})
    page = Page("A demo", "lead")
    for heading, *blocks in parts_of_a_demo:
        page.section(heading, *blocks)
    page.next_steps(next_steps(folder / LONG[:200]))
    page.section("Wide", finding(LONG), table([f"column {i}" for i in range(30)], [[i] * 30 for i in range(2)]))
    page.write(folder / "demo.html")
    return dict(
        zip(REPORTS, (write_run_report(run), folder / "sweep" / "report.html", folder / "demo.html"), strict=True)
    )


@pytest.fixture(scope="module")
def parts_of_a_demo():
    from mvm.data import DATA_SETS
    from mvm.demo import QUICK
    from mvm.model import load

    model, real = load("digits"), DATA_SETS["digits"].load("train")
    results = [cell(nfe, rho, 2.0, **{"fd-pixels": nfe + rho}) for nfe in (2, 3) for rho in (0.0, 1.0)]
    return [
        shipped_section("colour", model, QUICK),
        digits_section(model, real, results, 2.0, 5.0),
        path_section(model),
        distance_section(results, 2.0, 100, 397),
    ]


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("kind", REPORTS)
@pytest.mark.parametrize("width", [390, 1280])
def test_no_horizontal_scrolling(browser, pages, kind, width):
    """Of the page; wide tables and long commands scroll inside their boxes, and pictures fit."""
    page = browser.new_context(viewport={"width": width, "height": 800}, offline=True).new_page()
    page.goto(pages[kind].as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    pictures = "[...document.querySelectorAll('img')].filter(e => !e.closest('.wide'))"
    assert max(page.evaluate(f"{pictures}.map(e => e.getBoundingClientRect().right)"), default=0) <= width
    if kind == "demo":
        assert page.evaluate("[...document.querySelectorAll('.wide')].some(e => e.scrollWidth > e.clientWidth)")
    page.context.close()


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_text_differs_from_its_background(browser, pages, scheme, dark):
    page = browser.new_context(color_scheme=scheme).new_page()
    page.goto(pages["run"].as_uri())
    for element in ("body", "pre", ".finding", "figcaption"):
        found = page.evaluate(f"getComputedStyle(document.querySelector('{element}')).color")
        ink = sum(int(part) for part in found[4:-1].split(","))
        assert (ink > 450) == dark
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in paper[4:-1].split(",")) < 150) == dark
    page.context.close()
