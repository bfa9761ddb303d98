"""mvm sweep, mvm compare: from a shipped model to a report on one core, twice over, and mistakes."""

import json
import subprocess
import sys

import pytest

from mvm.cli import run

pytest.importorskip("matplotlib", reason="reports are drawn with matplotlib")

TINY = ["--num", "12", "--nfe", "1,2", "--rho", "0"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- sweep


def test_a_sweep_of_the_shipped_model(here, done):
    said = done("sweep", "digits", *TINY, "--cfg", "1,2", "--interval", "0,1", "--interval", "0.6,0.8")
    lines = said.splitlines()
    assert lines[-1] == "wrote runs/sweep-digits/report.html: 6 cells of 12 images"
    assert lines[0] == "cell 1 of 6: adams-nfe1-rho0"
    assert lines[5] == "cell 6 of 6: adams-nfe2-rho0-cfg2-0.6-0.8"
    folder = here / "runs" / "sweep-digits"
    assert (folder / "report.html").stat().st_size > 10_000
    assert len((folder / "results.csv").read_text().splitlines()) == 7
    assert {path.suffix for path in (folder / "plots").iterdir()} == {".png", ".svg"}
    found = json.loads((folder / "results.json").read_text())
    assert len(found["results"]) == 6
    assert found["facts"]["model"]["run"] == "digits"
    assert found["facts"]["reference"]["split"] == "train"
    assert all(list(result["metrics"]) == ["fd-pixels"] for result in found["results"])
    assert str(here) not in json.dumps(found)


def test_made_again_it_says_the_same_and_grows(here, done):
    done("sweep", "digits", *TINY, "--out", "s")
    before = json.loads((here / "s" / "results.json").read_text())["results"]
    files = {path: path.stat().st_mtime_ns for path in (here / "s" / "cells").iterdir()}
    done("sweep", "digits", *TINY, "--out", "s")
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert json.loads((here / "s" / "results.json").read_text())["results"] == before
    done("sweep", "digits", "--num", "12", "--nfe", "1,2,3", "--rho", "0", "--out", "s")
    after = json.loads((here / "s" / "results.json").read_text())["results"]
    assert [result for result in after if result["nfe"] < 3] == before
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_a_value_added_by_itself_is_added_to_the_report(here, done):
    done("sweep", "digits", *TINY, "--out", "s")
    done("sweep", "digits", "--num", "12", "--nfe", "3", "--rho", "0", "--out", "s")
    assert {result["nfe"] for result in json.loads((here / "s" / "results.json").read_text())["results"]} == {1, 2, 3}


def test_a_run(trained, here, done):
    done("sweep", trained, *TINY, "--weights", "model", "--labels", "random", "--repeats", "2", "--out", "s")
    found = json.loads((here / "s" / "results.json").read_text())
    assert found["facts"]["model"]["weights"] == "model"
    assert found["facts"]["draw"]["labels"] == "random"
    assert all(result["metrics"]["fd-pixels"]["error"] > 0 for result in found["results"])
    assert str(trained.parent) not in json.dumps(found["facts"]["model"])


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["nothing"], "'nothing' is neither a run directory"),
        (["digits", "--solvers", "heun", "--rho", "1"], "cell heun-nfe8-rho1 cannot be sampled: "),
        (["digits", "--solvers", "adam"], "did you mean 'adams'"),
        (["digits", "--solvers", ""], "--solvers"),
        (["digits", "--nfe", "8,x"], "--nfe 8,x: values separated by commas are needed"),
        (["digits", "--nfe", "0"], "nfe=0"),
        (["digits", "--rho", "-1"], "rho=-1"),
        (["digits", "--rho", "0,7"], "rho=7.0 is out of range; it must lie in [0, 5.0]"),
        (["digits", "--cfg", "inf"], "cfg=inf is out of range"),
        (["digits", "--cfg", "2", "--interval", "0.8"], "--interval 0.8: two numbers"),
        (["digits", "--cfg", "2", "--interval", "0.8,0.6"], "interval=[0.8, 0.6]"),
        (["digits", "--metrics", "fdd"], "metrics='fdd' is unknown"),
        (["digits", "--num", "1"], "num=1 is out of range; it must be at least 2"),
        (["digits", "--batch", "0"], "batch=0"),
        (["digits", "--repeats", "0"], "repeats=0"),
        (["digits", "--jackknife", "-1"], "--jackknife -1"),
        (["digits", "--labels", "some"], "labels='some' is unknown"),
        (["digits", "--weights", "best"], "weights='best'"),
        (["digits", "--ref", "nothing"], "source='nothing' does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_of_sweep(here, tokens, words, refused):
    assert words in refused("sweep", *tokens)
    assert list(here.iterdir()) == []


def test_classes_out_of_range_are_refused(here, capsys):
    assert run(["sweep", "digits", *TINY, "--classes", "10"]) == 2
    assert "classes=10 out of range" in capsys.readouterr().err


def test_a_sweep_does_not_go_into_a_run(trained, refused):
    before = sorted(trained.iterdir())
    said = refused("sweep", "digits", *TINY, "--out", trained)
    assert "is a folder with other files in it (" in said
    assert said.endswith("give another --out")
    assert sorted(trained.iterdir()) == before


def test_another_sweep_in_the_same_folder(here, done, refused):
    done("sweep", "digits", *TINY, "--out", "s")
    said = refused("sweep", "digits", "--num", "13", "--nfe", "1", "--rho", "0", "--out", "s")
    assert said.startswith("mvm: 's' holds a sweep with other values of draw.num (12, now 13)")
    assert said.endswith("give another --out")
    assert "reference" in refused("sweep", "digits", *TINY, "--ref", "data:digits:held-out", "--out", "s")


def test_the_value_that_differs_is_named(here, done, refused):
    done("sweep", "digits", *TINY, "--out", "s")
    said = refused("sweep", "digits", "--num", "13", "--nfe", "1", "--rho", "0", "--out", "s")
    assert "num" in said
    assert "labels" not in said


def test_an_interrupt_is_a_message(here, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mvm.generate.Sampler.launch", stop)
    code = run(["sweep", "digits", *TINY, "--out", "s"])
    assert code == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("tokens", "kernels"), [([], True), (["--no-kernels"], False)])
def test_kernels_by_hand_can_be_left_out(here, done, monkeypatch, tokens, kernels):
    asked = []
    monkeypatch.setattr("mvm.generate.compile_network", lambda model, kernels: asked.append(kernels))
    done("sweep", "digits", "-n", "12", "--nfe", "1", "--rho", "0", "--compile", *tokens)
    assert asked == [kernels]


@pytest.mark.parametrize("command", ["sweep", "compare"])
def test_num_has_a_short_name_for_torchrun(here, done, command):
    models = ["digits"] if command == "sweep" else ["digits", "digits", "--blocks", "2"]
    done(command, *models, "-n", "12", "--nfe", "1", "--rho", "0")


def test_processes_share_a_sweep(here, done):
    tokens = ["sweep", "digits", "--nfe", "2", "--rho", "0", "--batch", "4", "--device", "cpu", "--out"]
    # torchrun takes a --num of its own command line for its --numa-binding, so it is added behind its back
    code = "import sys; from mvm.cli import main; sys.argv[1:] += ['--num', '12']; main()"
    (here / "start.py").write_text(code)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "start.py"]
    command = [*start, *tokens, "two"]
    two = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert two.returncode == 0, two.stderr[-4000:]
    assert two.stdout.count("wrote two/report.html: 1 cells of 12 images") == 1
    done(*tokens, "one", "--num", "12")
    a, b = (json.loads((here / name / "results.json").read_text())["results"][0] for name in ("one", "two"))
    assert b["metrics"]["fd-pixels"]["value"] == pytest.approx(a["metrics"]["fd-pixels"]["value"], abs=1e-5)


# ---- compare


def table(said):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines()[2:]]


def test_a_model_and_itself(here, done):
    rows = table(done("compare", "digits", "digits", "--num", "40", "--nfe", "2", "--blocks", "4"))
    assert [row[0] for row in rows] == ["fd-pixels"]
    assert rows[0][1] == rows[0][2]
    assert rows[0][3:] == ["+0", "+0 to +0", "no significant difference"]


def test_two_models(trained, here, done):
    tokens = ["--num", "60", "--nfe", "4", "--blocks", "4", "--metrics", "fd-pixels,kd-pixels"]
    rows = table(done("compare", trained, "digits", *tokens, "--json", "c.json"))
    assert [(row[0], row[-1]) for row in rows] == [("fd-pixels", "differs"), ("kd-pixels", "differs")]
    found = json.loads((here / "c.json").read_text())
    assert [row["name"] for row in found["differences"]] == ["fd-pixels", "kd-pixels"]
    assert all(row["differs"] and row["difference"] < 0 for row in found["differences"])
    assert found["a"]["draw"] == found["b"]["draw"]
    assert found["a"]["origin"]["step"] == 10


def test_places_are_not_told(trained, here, done):
    done("compare", trained, trained, "--num", "40", "--nfe", "1", "--blocks", "4", "--json", "c.json")
    assert str(trained.parent) not in (here / "c.json").read_text()


def test_the_json_of_compare_is_complete(here, done):
    done("compare", "digits", "digits", "--num", "40", "--nfe", "1", "--blocks", "4", "--json", "c.json")
    found = json.loads((here / "c.json").read_text())
    assert set(found) >= {"differences", "a", "b", "reference", "networks", "software", "blocks", "warnings"}


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["digits"], "MODEL_B"),
        (["digits", "digts"], "did you mean 'digits'"),
        (["digits", "digits", "--blocks", "1"], "blocks=1"),
        (["digits", "digits", "--metrics", "fdd"], "metrics='fdd' is unknown"),
        (["digits", "digits", "--num", "0"], "num=0"),
        (["digits", "digits", "--solver", "heun", "--rho", "1", "--num", "20"], "ODE solver"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_of_compare(here, tokens, words, refused):
    assert words in refused("compare", *tokens)
    assert list(here.iterdir()) == []
