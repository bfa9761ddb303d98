"""The sampler options: every command that samples has all of them, by the same names, help, checks and hints."""

import json

import pytest

from mvm.cli import run
from mvm.cli.app import app
from mvm.generate import Sampler
from mvm.options import meanings
from mvm.settings import OPTIONS, SampleConfig

DRAW = ["--num", "4"]
# command, its arguments, and what keeps its work small
COMMANDS = {
    "sample": ["digits", *DRAW],
    "compare": ["digits", "digits", *DRAW, "--blocks", "2"],
    "eval": ["digits", *DRAW],
    "sweep": ["digits", *DRAW],
    "bench": ["digits", "--steps", "0", "--samples", "4"],
    "onnx": ["digits"],
}
ASKED = {
    "solver": ("sa", "sa"), "nfe": ("5", 5), "rho": ("0.5", 0.5), "cfg": ("1.5", 1.5), "interval": ("0.2,0.7", None),
    "internal": ("1", 1.0), "auto_scale": ("1", 1.0), "share": ("0", 0.0), "t_min": ("1e-4", 1e-4), "shift": ("8", 8.0),
}  # fmt: skip


class Seen(ValueError):
    """Ends a command when it has said by what settings it samples."""


@pytest.fixture
def settings_of(monkeypatch, tmp_path, capsys):
    """Run a command up to its first batch; return the settings it is made with."""
    monkeypatch.chdir(tmp_path)
    seen = []

    def watch(*arguments, **how):
        seen.extend(each for each in (*arguments, *how.values()) if isinstance(each, SampleConfig))
        raise Seen("seen")

    monkeypatch.setattr(Sampler, "launch", watch)
    monkeypatch.setattr("mvm.integrations.onnx.write_onnx", watch)
    monkeypatch.setattr("mvm.evaluation.sweep.require_plots", lambda: None)

    def check(command, *tokens):
        assert run([command, *COMMANDS[command], *tokens]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == "mvm: seen"
        return seen.pop()

    return check


def arguments_of(command):
    return {name: argument for argument in app[command].assemble_argument_collection() for name in argument.names}


@pytest.mark.parametrize("command", COMMANDS)
class TestEveryCommand:
    def test_has_every_option_with_the_help_of_the_setting(self, command):
        found, said = arguments_of(command), meanings(SampleConfig)
        for name in OPTIONS:
            assert found[f"--{name.replace('_', '-')}"].parameter.help.startswith(said.get(name, "Where guidance acts"))

    def test_takes_them(self, command, settings_of):
        tokens = [token for name, (text, _) in ASKED.items() for token in (f"--{name.replace('_', '-')}", text)]
        settings = settings_of(command, *tokens)
        assert (settings.low, settings.high) == (0.2, 0.7)
        for name, (_, value) in ASKED.items():
            assert value is None or getattr(settings, name) == value
        assert not settings.tuned

    def test_has_the_recipes_where_none_is_given(self, command, settings_of):
        settings = settings_of(command)
        assert settings == (SampleConfig(nfe=8) if command == "sweep" else SampleConfig())

    def test_takes_the_tolerance(self, command, settings_of):
        assert settings_of(command, "--solver", "dopri5", "--tolerance", "1e-3").tolerance == 1e-3

    @pytest.mark.parametrize(
        ("tokens", "words"),
        [
            (["--interval", "0.6,0.8"], "--interval 0.6,0.8 acts on guidance; give its scale too, e.g. --cfg 1.5"),
            (["--cfg", "2", "--interval", "0.8"], "--interval 0.8: two numbers in [0, 1] are needed"),
            (
                ["--nfe", "9", "--solver", "dopri5"],
                "--nfe 9 has no effect with --solver dopri5, which is adaptive; give",
            ),
            (["--tolerance", "0.01"], "--tolerance 0.01 belongs to --solver adaptive or dopri5"),
            (["--t-min", "0.01"], "--t-min 0.01 belongs to --solver sa"),
            (["--solver", "adam"], "solver='adam' is unknown (did you mean 'adams'?)"),
            (["--nfe", "0"], "nfe=0 is out of range; it must lie in [1, 20000]"),
            (["--nfe", "2.5"], "2.5"),
            (["--rho", "7"], "rho=7.0 is out of range; it must lie in [0, 5.0]"),
            (["--cfg", "inf"], "cfg=inf is out of range"),
            (["--share", "1"], "share=1.0 is out of range; it must be at least 0 and less than 1"),
            (["--share", "0.5"], "share=0.5"),
            (["--internal", "2"], "internal=2.0"),
            (["--auto-scale", "2"], "auto_scale=2.0"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_refuses_what_has_no_effect_or_no_meaning(self, command, tokens, words, refused, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert words in refused(command, *COMMANDS[command], *tokens)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("theirs", "ours"),
        [("guidance_scale", "cfg"), ("num_inference_steps", "nfe"), ("cfg-scale", "cfg"), ("sampler", "solver")],
    )
    def test_knows_the_names_of_other_projects(self, command, theirs, ours, refused):
        said = refused(command, *COMMANDS[command], f"--{theirs}", "2")
        assert f"unknown option '--{theirs}'; did you mean --{'sample.' * (command == 'bench')}{ours}?" in said


@pytest.mark.parametrize("command", ["sample", "compare", "eval", "sweep"])
class TestWhatIsDrawn:
    """Options of which images, by which weights: the same in all commands that draw them."""

    def test_weights_and_checkpoint(self, command, trained, refused, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        arguments = [str(trained) if token == "digits" else token for token in COMMANDS[command]]
        assert "weights='none'" in refused(command, *arguments, "--weights", "none")
        assert "7" in refused(command, *arguments, "--checkpoint", "7")

    def test_classes_seed_labels_and_precision(self, command, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        seen = []

        def watch(sampler, labels, seeds, *more):
            seen.append((labels.tolist(), seeds.tolist(), sampler.precision))
            raise Seen("seen")

        monkeypatch.setattr(Sampler, "launch", watch)
        assert run([command, *COMMANDS[command], "--classes", "3,5", "--seed", "8", "--precision", "bf16"]) == 2
        assert seen.pop() == ([3, 5, 3, 5], [8, 9, 10, 11], "bf16")
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")  # a sweep has begun in the first
        assert run([command, *COMMANDS[command], "--classes", "3,5", "--labels", "random"]) == 2
        assert set(seen.pop()[0]) <= {3, 5}

    @pytest.mark.parametrize(
        ("tokens", "words"),
        [
            (["--classes", "12"], "classes=12 out of range"),
            (["--classes", "cat"], "classes=cat is unknown"),
            (["--labels", "some"], "labels='some' is unknown"),
            (["--precision", "fp8"], "precision='fp8' is unknown"),
            (["--seed", "-1"], "seed=-1 is out of range"),
            (["--batch", "0"], "batch=0 is out of range"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_mistakes(self, command, tokens, words, monkeypatch, tmp_path, refused):
        monkeypatch.chdir(tmp_path)
        assert words in refused(command, *COMMANDS[command], *tokens)


def test_both_runs_of_an_evaluation_take_them(tmp_path, done):
    tokens = ["--ref", "digits", "--num", "8", "--nfe", "2", "--rho", "1", "--seed", "3", "--metrics", "fd-pixels"]
    done("eval", "digits", *tokens, "--json", tmp_path / "x.json")
    found = json.loads((tmp_path / "x.json").read_text())
    for role, seed in (("images", 3), ("reference", 11)):  # seeds of its own
        assert (found[role]["sampler"]["nfe"], found[role]["sampler"]["rho"]) == (2, 1.0)
        assert found[role]["draw"]["seed"] == seed


@pytest.mark.parametrize("tokens", [["--nfe", "4"], ["--t-min", "1e-4"], ["--weights", "model"], ["--seed", "3"]])
def test_stored_images_take_none(refused, tokens):
    said = refused("eval", "data:digits", "--ref", "data:digits:held-out", *tokens)
    assert said.startswith(f"mvm: {tokens[0]} ")
    assert said.endswith("is for sampling a run, and 'data:digits' is not a run; leave it out")
