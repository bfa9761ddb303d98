"""`import mvm` is light, and says what it has."""

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mvm
from mvm.options import DISTRIBUTION

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "numpy", "PIL", "matplotlib", "cyclopts", "tqdm", "safetensors", "torchdiffeq")
NEVER = ("transformers", "diffusers", "matplotlib", "gradio", "torchvision", "scipy", "sklearn", "torchdiffeq")


def after(code):
    """Seconds and modules loaded by a fresh interpreter that runs the code."""
    program = (
        "import json, sys, time; start = time.perf_counter()\n"
        f"{code}\n"
        "print(json.dumps([time.perf_counter() - start, sorted({m.split('.')[0] for m in sys.modules})]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seconds, modules = json.loads(done.stdout.splitlines()[-1])
    return seconds, set(modules)


def test_import_is_quick_and_light():
    seconds, modules = after("import mvm")
    assert seconds < 1.5
    assert not modules & set(HEAVY + NEVER)


def test_dir_and_version_load_nothing():
    _, modules = after("import mvm; dir(mvm); mvm.__version__; hasattr(mvm, 'nothing')")
    assert not modules & set(HEAVY + NEVER)


def test_sampling_and_training_load_no_optional_package():
    _, modules = after("import mvm; mvm.sample; mvm.load; mvm.oracle; import mvm.training.loop, mvm.generate")
    assert "torch" in modules
    assert not modules & set(NEVER)


def test_the_command_starts_without_torch():
    """--help and mistakes in the command line are answered at once."""
    _, modules = after("import mvm.cli; assert mvm.cli.run(['smple']) == 2; assert mvm.cli.run(['--help']) == 0")
    assert "torch" not in modules


def test_dir():
    functions = ["load", "loss", "sample", "train", "wrap"]
    modules = ["bridge", "edit", "generate", "likelihood", "noise", "oracle", "path", "solver"]
    assert dir(mvm) == sorted(["Model", "__version__", *functions, *modules])
    for name in dir(mvm):
        assert getattr(mvm, name) is not None


def test_names_are_the_ones_of_their_modules():
    import mvm.model
    import mvm.objective.matching
    import mvm.solver.sampling
    import mvm.training.loop

    assert mvm.sample is mvm.solver.sampling.sample
    assert mvm.load is mvm.model.load
    assert mvm.Model is mvm.model.Model
    assert mvm.loss is mvm.objective.matching.loss
    assert mvm.train is mvm.training.loop.train
    assert mvm.path.MeanVelocity().end == 1


def test_the_front_is_callable_whatever_was_imported_first():
    """`generate` and `likelihood` are modules too: their functions are imported from them."""
    calls = """
import mvm{before}
import torch
made = mvm.generate("digits", 2, nfe=1, progress=False)
again = mvm.load("digits").generate(2, nfe=1, progress=False)
assert torch.equal(made.images, again.images) and mvm.generate.Sampler is not None
field, x = mvm.oracle.gaussian(0.0, 1.0).field(mvm.path.MeanVelocity()), torch.zeros(1, 1)
how = {{"steps": 2, "method": "exact"}}
assert torch.equal(mvm.likelihood(field, x, **how), mvm.likelihood.log_likelihood(field, x, **how))
"""
    for before in ("", ", mvm.generate, mvm.likelihood"):
        after(calls.format(before=before))


def test_star_import():
    names = {}
    exec("from mvm import *", names)
    assert callable(names["sample"])


@pytest.mark.parametrize("name", ["samplle", "cli_", "torch"])
def test_unknown_attribute(name):
    with pytest.raises(AttributeError, match=f"module 'mvm' has no attribute '{name}'"):
        getattr(mvm, name)


def test_torchao_s_list_of_what_it_lacks_is_not_shown():
    """It is printed on import wherever a GPU library does not load, by way of diffusers."""
    code = "from mvm.integrations.diffusers import MVMPipeline; from diffusers import AutoencoderKL"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Failed to load" not in done.stderr
    assert "_pytree" not in done.stderr


def test_version_is_the_packages():
    from importlib.metadata import version

    assert mvm.__version__ == version(DISTRIBUTION)


def test_one_version_everywhere():
    """The citation cannot import it, and the changelog must say what it brought."""
    assert re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == mvm.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert newest in (mvm.__version__, "Unreleased")


def test_no_text_sends_users_to_another_project_s_package():
    """`mvm` on the package index is not ours; every hint to install goes by options.install."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    wrong = re.compile(rb"pip3? install[^\n]{0,40}?[ '\"=]mvm\b(?!-)")
    bad = [name for name in listed.stdout.splitlines() if wrong.search((ROOT / name).read_bytes())]
    assert bad == []
    written = [path for path in (ROOT / "src").rglob("*.py") if "pip install" in path.read_text()]
    assert [path.name for path in written] == ["options.py"]


def test_modules_that_may_be_called_are_pickled_by_name():
    for module in (mvm.generate, mvm.likelihood):
        assert pickle.loads(pickle.dumps(module)) is module
