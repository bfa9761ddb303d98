"""Sweeps: which cells, common images, nothing computed twice, and the same figures after an interruption."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image

from mvm.data import digits
from mvm.evaluation import sweep as module
from mvm.evaluation.cells import Result, combinations, file_name
from mvm.evaluation.evaluate import ComparedSet, Judge, compare, evaluate, open_side, write_statistics
from mvm.evaluation.images import of_model, of_tensor
from mvm.evaluation.sweep import Sweep, check_cells
from mvm.evaluation.sweep_report import gap, reading
from mvm.files import locked
from mvm.generate import Draw, Sampler
from mvm.metrics.distances import shrunken_features
from mvm.metrics.extractors import EXTRACTORS, Extractor, Sources
from mvm.model import load
from mvm.recipes import SampleConfig
from mvm.untrusted import read_json

pytest.importorskip("matplotlib", reason="reports are drawn with matplotlib")

DRAW = Draw(10, seed=4, batch=4)
CELLS = combinations(solver=("adams",), nfe=(1, 2), rho=(0.0, 0.5))


@pytest.fixture(scope="module")
def model():
    return load("digits")


def side():
    return ComparedSet("digits", of_tensor(digits("held-out").images[:80], "digits", count=80))


def sweep(model, folder, *, metrics=("fd-pixels",), draw=DRAW, reference=None, judge=None, precision="fp32", **more):
    judge = judge or Judge(progress=False)
    sampler = model if isinstance(model, Sampler) else Sampler(model, precision)
    return Sweep(sampler, draw, judge, reference or side(), tuple(metrics), folder, **more)


def kept(folder):
    """Figures in results.json, by cell."""
    results = json.loads((folder / "results.json").read_text())["results"]
    return {file_name(Result.read(result).settings): result["metrics"] for result in results}


def cells_in(folder):
    return [json.loads(path.read_text()) for path in sorted((folder / "cells").glob("*.json"))]


@pytest.fixture(autouse=True)
def plain_report(monkeypatch, request):
    """Plots take most of the time; they are drawn where they are looked at."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(module, "write_report", lambda folder, results, facts: None)


@pytest.fixture
def drawn():
    """Ask for the real report."""


@pytest.fixture
def made(monkeypatch):
    """The batches that are sampled, as (settings, labels, seeds)."""
    seen, real = [], Sampler.launch

    def watch(sampler, labels, seeds, settings, *more):
        seen.append((settings, labels.tolist(), seeds.tolist()))
        return real(sampler, labels, seeds, settings, *more)

    monkeypatch.setattr(Sampler, "launch", watch)
    return seen


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """A sweep made in one go; not to be changed."""
    folder = tmp_path_factory.mktemp("sweep") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "write_report", lambda *_: None)
        sweep(model, folder).run(CELLS)
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copy")


# ---- cells


def test_cells_are_the_product_in_order():
    cells = combinations(solver=("adams", "sa"), nfe=(4, 8), rho=(0.0, 1.0), cfg=(1.0,))
    assert [file_name(cell) for cell in cells] == [
        f"{solver}-nfe{nfe}-rho{rho}" for solver in ("adams", "sa") for rho in (0, 1) for nfe in (4, 8)
    ]


def test_guidance_one_has_no_interval_and_no_cell_comes_twice():
    cells = combinations(nfe=(4, 4), rho=(0.0,), cfg=(1.0, 1.5), interval=((0.0, 1.0), (0.6, 0.8)))
    assert [file_name(cell) for cell in cells] == [
        "adams-nfe4-rho0", "adams-nfe4-rho0-cfg1.5-0-1", "adams-nfe4-rho0-cfg1.5-0.6-0.8",
    ]  # fmt: skip
    plain = cells[0]
    assert (plain.low, plain.high) == (0, 1)


def test_solvers_that_take_no_nfe_have_one_cell():
    assert len(combinations(solver=("dopri5",), nfe=(8, 13, 26), rho=(0.0,))) == 1
    cells = combinations(solver=("dopri5", "heun"), nfe=(8,), rho=(0.0,), tolerance=(1e-3, 1e-4))
    assert [file_name(cell) for cell in cells] == [
        "dopri5-tolerance0.001-rho0", "dopri5-tolerance0.0001-rho0", "heun-nfe8-rho0",
    ]  # fmt: skip


def test_solvers_of_the_ode_alone_have_the_cells_of_rho_0():
    cells = combinations(solver=("heun", "adams", "dpm++2m", "dopri5"), nfe=(4,), rho=(0.0, 1.0))
    assert [file_name(cell) for cell in cells] == [
        "heun-nfe4-rho0", "adams-nfe4-rho0", "adams-nfe4-rho1", "dpm++2m-nfe4-rho0", "dopri5-tolerance1e-05-rho0",
    ]  # fmt: skip


def test_names_of_cells():
    assert file_name(SampleConfig(nfe=26, rho=0.75, cfg=1.2, low=0.6, high=0.8)) == "adams-nfe26-rho0.75-cfg1.2-0.6-0.8"


def test_an_impossible_cell_is_refused_before_any_work(model, tmp_path, made):
    cells = combinations(solver=("adams", "heun"), nfe=(2,), rho=(1.0,))
    with pytest.raises(ValueError, match=r"cell heun-nfe2-rho1 cannot be sampled: .*ODE solver"):
        sweep(model, tmp_path / "out").run(cells)
    assert made == []
    assert list(tmp_path.iterdir()) == []
    check_cells([cell for cell in cells if file_name(cell) != "heun-nfe2-rho1"], model)


def test_a_reference_that_does_not_fit_is_refused_before_any_work(model, tmp_path, made):
    other = ComparedSet("other", of_tensor(torch.zeros(20, 3, 16, 16, dtype=torch.uint8), "other"))
    with pytest.raises(ValueError, match="1x8x8 and 3x16x16"):
        sweep(model, tmp_path / "out", reference=other).run(CELLS)
    assert made == []


def test_missing_weights_are_told_before_any_work(model, tmp_path, made, monkeypatch):
    monkeypatch.setenv("MVM_OFFLINE", "1")
    monkeypatch.setenv("MVM_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="FID needs the weights"):
        sweep(model, tmp_path / "out", metrics=("fid",)).run(CELLS)
    assert made == []


# ---- common images, computed once


def test_all_cells_have_the_same_seeds_and_labels(model, tmp_path, made):
    sweep(model, tmp_path / "out").run(CELLS)
    by_cell = {}
    for settings, labels, seeds in made:
        by_cell.setdefault(file_name(settings), []).append((labels, seeds))
    assert len(by_cell) == 4
    assert len({json.dumps(parts) for parts in by_cell.values()}) == 1
    seeds = [seed for _, part in next(iter(by_cell.values())) for seed in part]
    assert seeds[:10] == list(range(4, 14))


def test_results_are_returned_and_kept(model, finished, made):
    found = sweep(model, finished).run(CELLS)
    assert made == []
    assert [(r.settings.nfe, r.settings.rho) for r in found] == [(1, 0), (2, 0), (1, 0.5), (2, 0.5)]
    assert {file_name(r.settings): r.metrics for r in found} == kept(finished)
    assert all(r.seconds > 0 and r.evaluations == r.passes == r.settings.nfe for r in found)
    assert len({r.metrics["fd-pixels"]["value"] for r in found}) == 3  # of one evaluation, rho says nothing
    assert not (finished / "work").exists()


def test_a_cell_is_what_an_evaluation_gives(model, finished):
    settings = SampleConfig(nfe=2, rho=0.5)
    want = evaluate(
        Judge(progress=False), ComparedSet("x", of_model(Sampler(model), DRAW, settings)), side(), ("fd-pixels",)
    )
    found = kept(finished)["adams-nfe2-rho0.5"]["fd-pixels"]["value"]
    assert found == pytest.approx(want.metrics["fd-pixels"].value, rel=0.02)  # batches differ in their last bits


def test_nothing_is_looked_at_twice(model, finished, monkeypatch):
    monkeypatch.setattr(module, "evaluate", None)
    monkeypatch.setattr(module, "Reference", None)
    monkeypatch.setattr(module, "sample_parts", None)
    sweep(model, finished).run(CELLS)


def test_a_new_value_of_an_axis_computes_its_cells_alone(model, copy, finished, made):
    sweep(model, copy).run(combinations(solver=("adams",), nfe=(1, 2, 3), rho=(0.0, 0.5)))
    assert {settings.nfe for settings, _, _ in made} == {3}
    assert {name: found for name, found in kept(copy).items() if "nfe3" not in name} == kept(finished)
    assert len(kept(copy)) == 6


def test_a_new_metric_leaves_the_others_as_they_were(model, copy, finished, monkeypatch):
    asked, real = [], module.evaluate

    def watch(judge, images, reference, names):
        asked.append(tuple(names))
        return real(judge, images, reference, names)

    monkeypatch.setattr(module, "evaluate", watch)
    sweep(model, copy, metrics=("fd-pixels", "kd-pixels")).run(CELLS)
    assert asked == [("kd-pixels",)] * 4
    for name, found in kept(copy).items():
        assert list(found) == ["fd-pixels", "kd-pixels"]
        assert found["fd-pixels"] == kept(finished)[name]["fd-pixels"]


@pytest.fixture
def other_network(monkeypatch):
    """A stand-in for EfficientNet, so that figures of two networks can be asked for."""

    def opener(sources, device):
        scale = len(sources.dino)
        return Extractor(
            "effnet", lambda x: {"pool": shrunken_features(x) * scale}, device, {"fingerprint": str(scale)}
        )

    monkeypatch.setitem(EXTRACTORS, "effnet", opener)


@pytest.mark.usefixtures("other_network")
def test_networks_and_warnings_of_all_figures_are_told_after_one_was_added(model, copy):
    before = json.loads((copy / "results.json").read_text())["facts"]
    sweep(model, copy, metrics=("fd-pixels", "kd-effnet")).run(CELLS)
    facts = json.loads((copy / "results.json").read_text())["facts"]
    assert set(facts["networks"]) == {"pixels", "effnet"}
    assert set(before["warnings"]) <= set(facts["warnings"])


@pytest.mark.usefixtures("other_network")
def test_figures_of_another_network_are_not_mixed(model, tmp_path):
    def run(encoder, cells):
        judge = Judge(Sources(dino=encoder), progress=False)
        return sweep(model, tmp_path / "out", metrics=("fd-effnet",), judge=judge).run(cells)

    run("a", CELLS[:1])
    with pytest.raises(ValueError, match="another"):
        run("abc", CELLS)


# ---- interruption


@pytest.mark.parametrize("at", [1, 4, 5, 9])
def test_an_interrupted_sweep_goes_on_to_the_same_figures(model, tmp_path, finished, monkeypatch, at):
    """Three batches make a cell: stopped in the first cell, between cells, in the second, and in the fourth."""
    folder, real, count = tmp_path / "out", Sampler.launch, []

    def stop(*arguments):
        count.append(1)
        if len(count) == at + 1:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(Sampler, "launch", stop)
    with pytest.raises(KeyboardInterrupt):
        sweep(model, folder).run(CELLS)
    assert not (folder / "results.json").exists()
    sweep(model, folder).run(CELLS)
    assert len(count) == 4 * 3 + 1  # the batch in flight, once more
    assert kept(folder) == kept(finished)


@pytest.mark.parametrize("told", ["Heun(name='heun')", None])
def test_a_cell_by_another_solver_is_refused(model, tmp_path, finished, told):
    """Its default times may have changed since, or nobody knows."""
    folder = tmp_path / "out"
    shutil.copytree(finished, folder)
    path = sorted((folder / "cells").glob("*.json"))[0]
    cell = read_json(path)
    assert cell["solver"].startswith("Adams(name='adams'")
    path.write_text(json.dumps({name: value for name, value in {**cell, "solver": told}.items() if value is not None}))
    with pytest.raises(ValueError, match=re.escape(f"made by another solver ({told or 'not recorded'}, now Adams(")):
        sweep(model, folder).run(CELLS)
    path.unlink()
    sweep(model, folder).run(CELLS)
    assert kept(folder) == kept(finished)


def test_interrupted_while_judging(model, tmp_path, finished, monkeypatch, made):
    folder, real = tmp_path / "out", module.evaluate

    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "evaluate", stop)
    with pytest.raises(KeyboardInterrupt):
        sweep(model, folder).run(CELLS)
    monkeypatch.setattr(module, "evaluate", real)
    sweep(model, folder).run(CELLS)
    assert len(made) == 4 * 3
    assert kept(folder) == kept(finished)


def test_seconds_are_those_of_sampling_though_images_were_there(model, tmp_path):
    folder, cells = tmp_path / "out", [SampleConfig(nfe=60)]
    (first,) = sweep(model, folder, keep_images=True).run(cells)
    (again,) = sweep(model, folder, keep_images=True, metrics=("fd-pixels", "kd-pixels")).run(cells)
    assert again.seconds == pytest.approx(first.seconds, rel=0.5)


# ---- another sweep in the same folder

OTHER = ComparedSet("digits", of_tensor(digits("train").images, "digits", count=1400))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"draw": replace(DRAW, num=12)}, r"draw.num \(10, now 12\)"),
        ({"draw": replace(DRAW, seed=5)}, r"draw.seed \(4, now 5\)"),
        ({"draw": replace(DRAW, labels="random")}, r"draw.labels \(balanced, now random\)"),
        (
            {"reference": ComparedSet("digits", of_tensor(digits("train").images, "digits", count=1400))},
            r"reference.count \(80, now 1400\)",
        ),
        ({"repeats": 2}, r"repeats \(1, now 2\)"),
        ({"precision": "bf16"}, r"sampling.precision \(fp32, now bf16\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_sweeps_of_another_kind_do_not_mix(model, finished, made, change, words):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=rf"'{re.escape(str(finished))}' holds a sweep with other values of {words}"):
        sweep(model, finished, **change).run(CELLS)
    assert made == []
    assert {path: path.read_bytes() for path in before} == before


def test_another_model_does_not_mix(model, finished):
    other = load("digits")
    other.origin = {**other.origin, "sha256": "0" * 64}
    with pytest.raises(ValueError, match=r"other values of origin.sha256"):
        sweep(other, finished).run(CELLS)


def test_a_file_of_moments_is_known_by_its_content_and_not_its_place(model, tmp_path):
    for place in ("secret", "elsewhere"):
        write_statistics(Judge(progress=False), side(), "pixels", tmp_path / place / "ref.npz")
    cells = [SampleConfig(nfe=1)]
    sweep(model, tmp_path / "out", reference=open_side(str(tmp_path / "secret" / "ref.npz"))).run(cells)
    assert "secret" not in (tmp_path / "out" / "sweep.json").read_text()


def test_another_folder_of_the_same_name_does_not_mix(model, tmp_path):
    cells, sides = [SampleConfig(nfe=1)], []
    for place, count in (("one", 20), ("two", 30)):
        folder = tmp_path / place / "val"
        folder.mkdir(parents=True)
        for number, image in enumerate(digits("train").images[:count, 0]):
            Image.fromarray(image.numpy()).save(folder / f"{number:03}.png")
        sides.append(open_side(str(folder)))
    sweep(model, tmp_path / "out", reference=sides[0]).run(cells)
    with pytest.raises(ValueError, match=r"other values of reference\.stamp"):
        sweep(model, tmp_path / "out", reference=sides[1]).run(cells)


HARMFUL = {
    "nested": "[" * 100_000,
    "no table": "[]",
    "another table": '{"result": {}, "facts": {}, "networks": 3}',
    "no UTF-8": b"\xff",
    "cut short": '{"result": {',
    "empty": "{}",
}


@pytest.mark.parametrize("name", ["sweep.json", "cells/adams-nfe1-rho0.json"])
@pytest.mark.parametrize("kind", HARMFUL)
def test_files_made_to_harm_are_refused_by_name(model, copy, name, kind):
    text = HARMFUL[kind]
    (copy / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=rf"{name}' is damaged.*remove it"):
        sweep(model, copy).run(CELLS)


def test_a_cell_beyond_the_limit_is_refused(model, copy, monkeypatch):
    monkeypatch.setattr(module, "read_json", lambda path: read_json(path, 100))
    with pytest.raises(ValueError, match=r"sweep\.json' is larger than 100 bytes"):
        sweep(model, copy).run(CELLS)


def test_two_sweeps_at_once(model, finished):
    with locked(finished), pytest.raises(ValueError, match="in use by another process"):
        sweep(model, finished).run(CELLS)


# ---- repeats, images


def test_repeats_give_a_mean_and_its_error(model, tmp_path, made):
    cells = [SampleConfig(nfe=2)]
    (found,) = sweep(model, tmp_path / "out", repeats=3).run(cells)
    singles = []
    for number in range(3):
        draw = replace(DRAW, seed=4 + 10 * number)
        (single,) = sweep(model, tmp_path / str(number), draw=draw).run(cells)
        singles.append(single.metrics["fd-pixels"]["value"])
    values = torch.tensor(singles, dtype=torch.float64)
    figure = found.metrics["fd-pixels"]
    assert figure["value"] == pytest.approx(float(values.mean()), rel=1e-12)
    assert figure["error"] == pytest.approx(float(values.std() / 3**0.5), rel=1e-9)
    assert figure["note"].startswith("mean of 3 repeats on other seeds")
    assert figure["parts"] == pytest.approx(((values - values.mean()) / 6**0.5).tolist(), rel=1e-9)
    assert len({seed for _, _, seeds in made for seed in seeds}) == 30


def test_two_cells_differ_as_compare_says_of_their_images(model, tmp_path):
    """Kept with each cell, the parts of its error give the paired interval that leaves images out of both at once."""
    draw, cells = Draw(90, seed=4, batch=45), [SampleConfig(nfe=2), SampleConfig(nfe=3)]
    sweep(model, tmp_path / "out", draw=draw, judge=Judge(progress=False, blocks=8)).run(cells)
    a, b = (reading(Result.read(told["result"]), "fd-pixels") for told in cells_in(tmp_path / "out"))
    images = [of_model(Sampler(model), draw, settings) for settings in cells]
    (want,) = compare(Judge(progress=False, blocks=8), *images, side(), ("fd-pixels",)).differences
    found = gap(a, b)
    assert (found.value, found.low, found.high) == pytest.approx((want.difference, want.low, want.high), rel=1e-6)
    assert want.error < 0.7 * max(a.error, b.error)  # the noise they share


def test_images_are_kept_when_asked(model, tmp_path):
    folder, cells = tmp_path / "out", [SampleConfig(nfe=1)]
    sweep(model, folder, keep_images=True).run(cells)
    assert len(list((folder / "work" / "adams-nfe1-rho0" / "0").glob("part-*.npy"))) == 3


def test_kept_images_serve_a_new_metric(model, tmp_path, made):
    folder, cells = tmp_path / "out", [SampleConfig(nfe=1)]
    sweep(model, folder, keep_images=True).run(cells)
    before = len(made)
    sweep(model, folder, keep_images=True, metrics=("kd-pixels",)).run(cells)
    assert len(made) == before
    assert set(kept(folder)["adams-nfe1-rho0"]) == {"fd-pixels", "kd-pixels"}


# ---- the report


@pytest.mark.usefixtures("drawn")
def test_the_report_is_written(model, finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "x")
    sweep(model, folder, command="mvm sweep digits").run(CELLS)
    page = (folder / "report.html").read_text()
    assert "mvm sweep digits" in page
    assert "http" not in re.sub(r"http://www\.w3\.org\S*|https?://\S*(w3|matplotlib|purl|creativecommons)\S*", "", page)
    rows = (folder / "results.csv").read_text().splitlines()
    assert len(rows) == 5
    assert rows[0].startswith("solver,nfe,rho,cfg,internal,low,high,auto_scale,evaluations,passes,")
    assert {path.name for path in (folder / "plots").iterdir()} == {"fd-pixels.png", "fd-pixels.svg"}
    assert {path.name for path in (folder / "cells").iterdir()} == {
        "real.png",
        *(f"{file_name(cell)}.{suffix}" for cell in CELLS for suffix in ("json", "png")),
    }
    assert page.count("real images, spread over the reference") == 2  # its caption, and for those who do not see it
    facts = json.loads((folder / "results.json").read_text())["facts"]
    assert facts["draw"] == {"num": 10, "seed": 4, "labels": "balanced", "classes": [], "batch": 4, "repeats": 1}
    assert (facts["name"], facts["images"]) == ("digits", 10)
    assert facts["reference"]["count"] == 80
    assert facts["warnings"]
    assert str(tmp_path) not in json.dumps(facts)


def test_the_compiler_works_before_the_clock(model, tmp_path, monkeypatch):
    seen = []
    sampler = Sampler(model)
    monkeypatch.setattr(sampler, "batch", lambda labels, *rest: seen.append(len(labels)))
    sampler.compiled = True
    cells = [SampleConfig(nfe=1), SampleConfig(nfe=2)]
    for _ in range(2):  # the second time there is nothing to sample
        sweep(sampler, tmp_path / "out").run(cells)
    assert seen == [min(DRAW.batch, DRAW.num)]
