"""Pages of results and docs/ say what the files under benchmarks/results hold: every figure by its file."""

import json
from pathlib import Path

import numpy as np
import pytest
from programs import RESULTS, ROOT, SOLVERS, imported

pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")


GRID, MANY = ("adams.csv", "grid-adams.json", "grid-sa.json"), ("table.json", "best.json")  # of the study that was run


@pytest.mark.parametrize(
    ("page", "files"),
    [
        *(("sde-ode", files) for files in (GRID, MANY, ("guidance.json",), ("guidance-more.json",))),
        *(("larger", files) for files in (("guidance.json",), ("best.json",))),
    ],
)
def test_the_page_of_a_study_says_what_was_measured(study, page, files):
    cells = study.read_results([RESULTS / page / name for name in files])
    assert study.table(cells) in (RESULTS / f"{page}.md").read_text("utf-8")


def test_the_page_of_the_larger_model_has_the_losses_that_were_logged(study):
    lines = (RESULTS / "larger" / "metrics.jsonl").read_text("utf-8").splitlines()
    logged = {row["step"]: row for row in map(json.loads, lines) if "loss" in row}
    page = (RESULTS / "larger.md").read_text("utf-8")
    for step in (500, 1200, 2000, 4000, 8000, 10000):
        row = logged[step]
        assert f"| {step:,} | {row['loss']:.4f} | {row['repa']:.3f} | {row['grad_norm']:.3f} |" in page
    alone = [row["images_per_second"] for row in logged.values() if row["images_per_second"] > 6900]
    assert f"{round(np.median(alone), -1):,.0f} images/s" in page
    assert sum(row["skipped"] for row in logged.values()) == 0


@pytest.mark.parametrize(
    ("file", "best", "other"),
    [
        *(("sde-ode/guidance-more", 3, other) for other in ((3, 0.6, 0.9), (4, 0.65, 0.8), (3, 0.65, 0.85))),
        *(("larger/guidance", 2.5, other) for other in ((2, 0.6, 0.8), (3, 0.6, 0.8))),
    ],
)
def test_the_page_says_what_other_guidance_costs(study, file, best, other):
    from mvm.evaluation.sweep_report import gap, reading

    results = study.read_results([RESULTS / f"{file}.json"])
    cells = {(r.settings.cfg, r.settings.low, r.settings.high): r for r in results}
    found = gap(*(reading(cells[place], "fid") for place in ((best, 0.6, 0.8), other)))
    page = (RESULTS / f"{Path(file).parent}.md").read_text("utf-8").replace("95 %: ", "").replace("\n", " ")
    assert found.paired
    assert f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})" in page


@pytest.mark.parametrize("files", [GRID, MANY[:1]])
def test_differences_on_the_page_of_the_study_are_those_of_its_cells(study, files):
    found = study.differences(study.read_results([RESULTS / "sde-ode" / name for name in files]))
    page = (RESULTS / "sde-ode.md").read_text("utf-8")
    assert found
    assert [title for title, rows in found.items() if rows not in page] == []


def test_the_page_of_the_study_has_the_t_min_that_was_found(study):
    cells = study.read_results([RESULTS / "sde-ode" / "tmin.json"])
    page = (RESULTS / "sde-ode.md").read_text("utf-8")
    for t_min in {r.settings.t_min for r in cells}:
        of = {(r.settings.nfe, r.settings.rho): r for r in cells if r.settings.t_min == t_min}
        row = [f"{study.value(of[nfe, rho]):.2f}" for nfe in (13, 39) for rho in (0.0, 0.75)]
        assert f"| {t_min:.0e} | {' | '.join(row)} |".replace("e-0", "e-") in page
    assert study.best_t_min(cells) == 1e-4


NEAR = ["near-cifar10", "near-second", "near-latent", "near-cifar10-guided"]
NEAR_CPU = ["near-third", "near-third-guided", "near-ddt-cpu", "near-ddt-cpu-guided"]


def test_the_page_of_the_solvers_has_the_errors_that_were_measured():
    near, page = imported("near_reference"), (RESULTS / "solvers.md").read_text("utf-8")
    files = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(SOLVERS.glob("near-*.json"))}
    assert sorted(files) == sorted(NEAR + NEAR_CPU)
    for names in (NEAR, NEAR_CPU):
        assert near.standing([files[name] for name in names]) + "\n" in page
    for told in files.values():
        assert (
            f"{near.named(told['facts'])[1:]}; floor {told['facts']['floor']:.4f}:\n\n{near.table(told, True)}\n"
            in page
        )
        for solver in ("adams", "ipndm, r 0.01 to 40"):
            assert f"| {solver} | " in near.table(told)


@pytest.mark.parametrize("name", ["cifar10", "second", "cifar10-guided", "cifar10-sde"])
def test_the_page_of_the_solvers_has_the_fids_that_were_measured(study, name):
    from mvm.evaluation.sweep_report import gap, in_words, reading

    page, cells = (RESULTS / "solvers.md").read_text("utf-8"), study.read_results([SOLVERS / f"fid-{name}.json"])
    rho = 1.0 if name == "cifar10-sde" else 0.0  # the table of the other rho is tested below
    found = {(r.solver, r.settings.nfe): reading(r, "fid") for r in cells if r.settings.rho == rho}
    nfes = sorted({nfe for _, nfe in found})
    for solver in {solver for solver, _ in found}:
        assert f"| {solver} | {' | '.join(in_words(found[solver, nfe]) for nfe in nfes)} |" in page
    assert study.differences(cells)["less adams at as many evaluations"] in page
    for fewer, more in ((8, 13), (10, 13), (13, 26), (20, 26)) if name == "cifar10" else ():
        assert (
            f"| {fewer} | {more} | {study.gap_text(gap(found['adams-power', more], found['adams', fewer]))} |" in page
        )


def test_the_page_of_the_solvers_has_the_fids_by_noise_and_of_tuned_times(study):
    from mvm.evaluation.sweep_report import gap, in_words, reading

    page = (RESULTS / "solvers.md").read_text("utf-8")
    files = [SOLVERS / f"fid-{name}.json" for name in ("cifar10", "cifar10-sde", "cifar10-tuned")]
    cells = study.read_results(files)
    found = {(r.solver, r.settings.rho, r.settings.nfe): reading(r, "fid") for r in cells}
    for rho in sorted({r.settings.rho for r in cells} - {0.0}):
        noisy = [found["adams", rho, nfe] for nfe in (8, 13, 26, 65)]
        assert f"| {rho:g} | {' | '.join(map(in_words, noisy))} |" in page
    assert [
        row for row in study.differences(cells)["SDE less ODE"].splitlines() if "| adams" in row and row not in page
    ] == []
    tuned = [study.gap_text(gap(found["adams", 0.0, nfe], found["adams, tuned", 0.0, nfe])) for nfe in (5, 8)]
    assert f"| FID, tuned less default | {' | '.join(tuned)} |" in page


def test_the_page_of_the_solvers_has_the_digits_that_were_measured(study):
    from mvm.evaluation.cells import Result
    from mvm.evaluation.sweep_report import gap, reading

    told = json.loads((SOLVERS / "digits.json").read_text("utf-8"))["results"]
    found = {(r["solver"], r["rho"], r["nfe"]): reading(Result.read(r), "fd-pixels") for r in told}
    page, nfes = (RESULTS / "solvers.md").read_text("utf-8"), (5, 8, 13, 26)
    values = [f"{found['adams', 0.0, nfe].value:.3f}" for nfe in nfes]
    assert f"`adams` has {', '.join(values)} by the ODE" in page
    for solver, rho, name in (("adams-power", 0.0, "ODE"), ("adams-power", 1.0, "SDE (rho 1)"), ("unipc", 0.0, "ODE")):
        gaps = [study.gap_text(gap(found["adams", rho, nfe], found[solver, rho, nfe])) for nfe in nfes]
        assert f"| `{solver}`, {name} | {' | '.join(gaps)} |" in page


def test_other_pages_quote_the_fids_that_were_measured(study):
    cells = study.read_results([SOLVERS / "fid-cifar10.json"])
    found = {(r.solver, r.settings.nfe): f"{study.value(r):.2f}" for r in cells}
    page = (ROOT / "docs" / "how-to/choose-a-sampler.md").read_text("utf-8")
    for solver in {r.solver for r in cells}:
        row = [found[solver, nfe] for nfe in (5, 8, 10, 13, 20, 26)]
        assert f"| `{solver}` | {' | '.join(f'**{v}**' if solver == 'adams' else v for v in row)} |" in page
    for words, nfe in (("| the best images |", 26), ("| speed |", 13), ("| a preview |", 8)):
        row = next(line for line in page.splitlines() if line.startswith(words))
        assert row.endswith(f"; not guided: {found['adams', nfe]} |")
    summary, samplers = ((ROOT / "docs/results" / name).read_text("utf-8") for name in ("index.md", "samplers.md"))
    for solver in ("adams", "adams-power", "unipc"):
        assert f"| `{solver}` | {' | '.join(found[solver, nfe] for nfe in (8, 13, 26))} |" in summary
    for solver in ("adams", "adams-power", "unipc", "dpm++2m", "deis", "sa"):
        row = next(line for line in samplers.splitlines() if line.startswith(f"| `{solver}`"))
        assert row.endswith(f" | {' | '.join(found[solver, nfe] for nfe in (5, 8, 10, 13, 26))} |")


def test_the_page_of_the_solvers_has_what_was_explored():
    page = (RESULTS / "solvers.md").read_text("utf-8")
    rows = {
        row["k"]: row for row in map(json.loads, (SOLVERS / "ending.jsonl").read_text().splitlines()) if row["n"] == 8
    }
    for orders, ending in (("P3C4", 1), ("P3C4", 2), ("P3C4", 3), ("P4C4", 3)):
        row = rows[f"c0.02 b1.0 {orders} E{ending} e0.1 sNone"]
        assert f" | {row['rmse0']:.4f} | {row['fid']:.2f} |" in page
    tags = [json.loads(line)["tag"] for line in (SOLVERS / "search.jsonl").read_text().splitlines()]
    assert f"{sum(isinstance(tag, list) for tag in tags)} candidates" in page


@pytest.mark.parametrize(
    "name",
    [
        *("digits", "digits-weights", "digits-controls", "digits-4e-3", "digits-8e-3"),
        *("cifar10", "cifar10-6000", "cifar10-4e-3"),
    ],
)
def test_the_page_of_equal_terms_says_what_was_measured(terms, name):
    runs = terms.read_runs(RESULTS / "equal-terms" / f"{name}.json")
    said = (RESULTS / "equal-terms.md").read_text(encoding="utf-8").splitlines()
    figures = terms.table(runs).split("\n\n")[1].splitlines()
    assert len(figures) > 2
    assert set(figures) <= set(said)
    if "mvm-u" in runs:
        assert set(terms.differences(runs, "mvm-u").splitlines()) <= set(said)


@pytest.mark.parametrize(("name", "most"), [("digits", 6), ("cifar10", 7)])
def test_the_short_page_of_equal_terms_has_the_same_means(terms, name, most):
    told_runs = imported("equal_terms_runs")
    runs = terms.read_runs(RESULTS / "equal-terms" / f"{name}.json")
    page = (ROOT / "docs/results/equal-terms.md").read_text("utf-8")
    several = [told for told in runs.values() if len(told) > 1]
    assert len(several) == most
    for told in several:
        found = " | ".join(str(told_runs.over_seeds(told, nfe, told_runs.COMMON)) for nfe in told_runs.NFES)
        assert f" | {found} | " in page


@pytest.mark.parametrize(("name", "process"), [("adams", "ODE"), ("adams", "SDE"), ("sa", "ODE"), ("sa", "SDE")])
def test_the_page_of_the_paper_has_the_curves_of_the_study(study, name, process):
    cells = study.read_results([RESULTS / "sde-ode" / file for file in GRID])
    rho = {"ODE": 0.0, "SDE": 0.75}[process]
    row = [
        f"{study.value(r):.2f}"
        for r in sorted(cells, key=lambda r: r.settings.nfe)
        if (r.settings.solver, r.settings.rho, r.settings.cfg) == (name, rho, 1.2)
    ]
    shown = {"adams": "adams-power", "sa": "sa"}[name]
    page = (ROOT / "docs/results/reproduce.md").read_text("utf-8")
    assert f"| {process}, CIFAR-10, `{shown}` | {' | '.join(row)} |" in page


def test_the_page_of_small_data_says_what_was_measured():
    lines = (RESULTS / "small-data.jsonl").read_text(encoding="utf-8").splitlines()
    runs = [json.loads(line) for line in lines]
    rows = {}
    for run in runs:
        rows.setdefault((run["images"], run["option"]), {})[run["seed"]] = run
    for (images, option), found in rows.items():
        values = [run["distance"]["26"] for run in found.values()]
        mean, loss = np.mean(values), np.mean([run["loss"] for run in found.values()])
        base = rows[images, "none"]
        pairs = [f"{found[s]['distance']['26'] - base[s]['distance']['26']:+.3f}" for s in found if s in base]
        told = ", ".join(pairs) if option != "none" else ""
        ends = f"{mean:.3f} [{min(values):.3f}, {max(values):.3f}]"
        row = " | ".join([str(images), option, str(len(found)), ends, told, f"{loss:.3f}"]).replace("|  |", "| |")
        assert f"| {row} |" in (RESULTS / "small-data.md").read_text(encoding="utf-8")


def test_the_page_of_rates_says_what_was_measured():
    said = (RESULTS / "rates.md").read_text(encoding="utf-8").splitlines()
    runs = [json.loads(line) for line in (RESULTS / "rates.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(runs) > 10
    for run in runs:
        rest = "" if run["rest"] == run["rate"] else f", rest {run['rest']:g}"
        at = [f"{run['loss at'][step]:.4f}" if step in run["loss at"] else "" for step in ("300", "500", "1000")]
        row = " | ".join([str(run["width"]), run["optimizer"], f"{run['rate']:g}{rest}", *at, f"{run['loss']:.4f}"])
        assert f"| {row} |".replace("|  |", "| |") in said


def test_the_pages_say_what_the_kept_trials_had():
    lines = (RESULTS / "trials.jsonl").read_text(encoding="utf-8").splitlines()
    trials = {run["trial"]: run for run in map(json.loads, lines)}
    fast, noisy = ([f"{trials[name][f'fid cfg {cfg}']:.2f}" for cfg in (1.0, 3.0)] for name in ("fast", "noisy"))
    assert f"| 2e-3 | {' | '.join(fast)} | " in (RESULTS / "rates.md").read_text(encoding="utf-8")
    log = (ROOT / "benchmarks" / "LOG.md").read_text(encoding="utf-8")
    assert all(figure in log for figure in noisy)


def test_the_page_of_preconditioning_says_what_was_measured(preconditioning):
    stored = (RESULTS / "preconditioning.jsonl").read_text(encoding="utf-8").splitlines()
    said = (RESULTS / "preconditioning.md").read_text(encoding="utf-8")
    assert preconditioning.table([json.loads(line) for line in stored]) in said


@pytest.mark.parametrize("table", ["scaling_table", "larger_batch_table", "dominance_table", "muon_table"])
def test_the_page_of_many_gpus_shows_the_tables(table):
    assert getattr(imported("scale_out"), table)() in (ROOT / "docs" / "how-to/many-gpus.md").read_text(
        encoding="utf-8"
    )


def test_the_page_of_many_gpus_shows_the_fit_of_what_was_measured(capsys):
    host = ("batch-16", "batch-64", "wide-batch-16", "tokens-64")
    command = ["fit", str(RESULTS / "cost-fit.json"), "--hold", "L", "--host", *host]
    imported("cost_fit").main([*command, "--check", str(RESULTS / "training-speed.json")])
    page = (ROOT / "docs" / "how-to/many-gpus.md").read_text(encoding="utf-8")
    for part in capsys.readouterr().out.strip().split("\n\n"):
        assert part in page
