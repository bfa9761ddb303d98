"""Real processes over gloo, started as a user starts them: whatever their number, it is the same run.

A launch costs some five seconds, so runs are made once and looked at by several tests.
"""

import contextlib
import inspect
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from mvm import checkpoint
from mvm.recipes import load_recipe, override
from mvm.training.loop import train
from mvm.training.trainer import Trainer

PATIENCE = 600  # seconds that a command may take: against a hang, not about speed
GRACE = 30  # seconds between SIGTERM and SIGKILL: torchrun's own, and what schedulers usually grant
STEPS, HALF = 20, 10
SMALL = {
    "network.depth": "2",
    "network.heads": "2",
    "network.width": "32",
    "train.batch": "24",
    "train.steps": str(STEPS),
    "train.warmup": "2",
    "train.ema": "0.9",
    "train.log_every": "1",
    "train.save_every": str(HALF),
}
# Everything that several processes do together: looks at samples, averages kept along the way.
WATCHED = {
    "preview.every": str(HALF),
    "preview.count": "11",  # not a multiple of any number of processes here
    "preview.grid": "4",
    "sample.nfe": "4",
    "train.power": "0.1",
    "train.snapshot_every": str(HALF),
}
FSDP = {"engine.parallel": "fsdp"}
HYBRID = {**FSDP, "engine.shard": "2"}
# Long enough to be interrupted in the middle: some 20 ms a step.
LONG = {"train.steps": "120", "train.save_every": "30"}
MUON = {"train.optimizer": "muon", "train.weight_decay": "0.1", "train.muon_split": "yes"}
CLOSE = 1e-5


# ---------------------------------------------------------------- starting processes


# `mvm`, and its exit code beside the run: of workers nobody else is told it
NOTING = """
import os, pathlib, sys
from mvm.cli import main
leave, run = os._exit, sys.argv[sys.argv.index("--out") + 1]
os._exit = lambda code: (pathlib.Path(f"{run}.code-{os.environ['RANK']}").write_text(str(code)), leave(code))
main()
"""


def command(processes, run, options, *flags, launcher=("--standalone",), program=("-m", "mvm")):
    """Return the command line that a user would type."""
    start = [sys.executable, "-m", "torch.distributed.run", *launcher, "--nproc-per-node", str(processes)]
    dotted = [word for name, value in {**SMALL, **options}.items() for word in (f"--{name}", value)]
    return [*start, *program, "train", "digits", *dotted, "--device", "cpu", "--out", str(run), "--no-report", *flags]


def workers(launcher):
    """Return the process ids of torchrun's workers by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end while we look
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            rank = re.search(rb"(?:^|\0)RANK=(\d+)", (folder / "environ").read_bytes())
            if parent == launcher.pid and rank:
                found[int(rank[1])] = int(folder.name)
    return found


class Started:
    """A command under way, its output in a file; whatever happens, nothing of it outlives the test."""

    def __init__(self, words, log):
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        with log.open("w") as file:
            self.process = subprocess.Popen(words, stdout=file, stderr=file, env=environment, start_new_session=True)

    @property
    def output(self):
        return self.log.read_text().replace("\r", "\n")

    def wait(self, patience=PATIENCE):
        """Return the exit code; one that hangs fails the test, and shows where it hung."""
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.stop(signal.SIGABRT)  # faulthandler then writes every thread's stack
            pytest.fail(f"still running after {patience} s:\n{self.output[-8000:]}")

    def wait_for_step(self, run, step):
        """Wait until the log of the run has passed a step."""
        end = time.monotonic() + PATIENCE
        while max(steps_of(run), default=0) < step:
            assert self.process.poll() is None, f"ended before step {step}:\n{self.output[-4000:]}"
            assert time.monotonic() < end, f"step {step} did not come:\n{self.output[-4000:]}"
            time.sleep(0.02)

    def stop(self, number=signal.SIGKILL):
        """End the workers and their launcher."""
        for worker in workers(self.process).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def started(processes, run, options, *flags, **how):
    """Yield a command under way."""
    log = run.with_name(f"{run.name}-{time.monotonic_ns()}.log")
    found = Started(command(processes, run, options, *flags, **how), log)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.stop()


def go(processes, run, options, *flags):
    """Run a command to its end, which must be a good one; return what it printed."""
    with started(processes, run, options, *flags) as work:
        assert work.wait() == 0, work.output[-4000:]
        return work.output


def alone(run, options, **how):
    """The same run in this process."""
    train(override(load_recipe("digits"), {**SMALL, **options}), run, progress=False, **how)


# ---------------------------------------------------------------- looking at runs


def lines(run):
    """Return the log lines; a last one that is being written is left out."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def steps_of(run):
    return [line["step"] for line in lines(run) if "loss" in line]


def looks(run):
    return [(line["step"], line["fd_pixels"]) for line in lines(run) if "fd_pixels" in line]


def figures(run):
    """Return losses, gradient norms and rates, a row per step: what a run computed, without what it measured."""
    found = [line for line in lines(run) if "loss" in line]
    names = sorted(found[0].keys() - {"images_per_second"})
    return torch.tensor([[line.get(name, 0.0) for name in names] for line in found], dtype=torch.float64)


def weights(run):
    """Return every tensor of the newest checkpoint, by part and name."""
    folder = checkpoint.latest(run)
    parts = [path.stem for path in sorted(folder.glob("*.safetensors"))]
    return {f"{part}/{name}": value for part in parts for name, value in checkpoint.load(folder, part).items()}


def distance(a, b):
    """Return the largest difference of two runs' weights; infinite where they hold other tensors."""
    first, second = weights(a), weights(b)
    if first.keys() != second.keys():
        return float("inf")
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def assert_close(run, other):
    """Same losses, gradient norms and weights to 1e-5, step by step, each logged once."""
    assert steps_of(run) == steps_of(other) == list(range(1, STEPS + 1))
    differences = (figures(run) - figures(other)).abs().max(), distance(run, other)
    print(f"{run.name}: losses and norms {differences[0]:.1e}, weights {differences[1]:.1e}")
    assert differences[0] < CLOSE
    assert differences[1] < CLOSE


def assert_identical(run, other):
    """Bit for bit, logs too."""
    assert checkpoint.latest(run).name == checkpoint.latest(other).name
    assert distance(run, other) == 0
    assert torch.equal(figures(run), figures(other))
    assert Counter(steps_of(run)).most_common(1)[0][1] == 1, "a step is logged twice"
    assert steps_of(run) == steps_of(other)


def cut(run, to):
    """Copy a run as a crash between its last two checkpoints leaves it: the log is ahead of the newest one."""
    shutil.copytree(run, to)
    shutil.rmtree(checkpoint.latest(to))
    assert checkpoint.latest(to).name == checkpoint.step_name(HALF)
    return to


# ---------------------------------------------------------------- runs that are made once


@pytest.fixture
def one(shared):
    return shared("one", lambda run: alone(run, WATCHED))


@pytest.fixture
def ddp(shared):
    return shared("ddp", lambda run: go(2, run, WATCHED))


@pytest.fixture
def fsdp(shared):
    return shared("fsdp", lambda run: go(2, run, {**WATCHED, **FSDP}))


@pytest.fixture
def undisturbed(shared):
    return shared("undisturbed", lambda run: go(2, run, LONG))


# ---------------------------------------------------------------- any number of processes, one run


def assert_watched(run, one):
    """Looks and kept averages as one process made them; files written once."""
    assert looks(run) == [(step, pytest.approx(quality, abs=1e-3)) for step, quality in looks(one)]
    assert [step for step, _ in looks(run)] == [HALF, STEPS]
    assert len(list((run / "tensorboard").iterdir())) == 1
    listed = [
        sorted(p.relative_to(r) for p in r.rglob("*") if p.is_file() and "events" not in p.name) for r in (run, one)
    ]
    assert listed[0] == listed[1]
    for folder in (run / "snapshots").iterdir():
        mine, theirs = (checkpoint.load(r / "snapshots" / folder.name, "power-0.1") for r in (run, one))
        assert all(torch.allclose(mine[name], theirs[name], atol=1e-3) for name in theirs)  # stored in half precision


def test_two_processes_with_copies_are_one_run(ddp, one):
    assert_close(ddp, one)
    assert_watched(ddp, one)


def test_two_processes_with_shards_are_one_run(fsdp, one):
    assert_close(fsdp, one)
    assert_watched(fsdp, one)


@pytest.mark.slow
def test_hybrid_shards_are_one_run(tmp_path, one):
    go(4, tmp_path / "hybrid", {**WATCHED, **HYBRID})
    assert_close(tmp_path / "hybrid", one)
    assert_watched(tmp_path / "hybrid", one)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, FSDP], ids=["ddp", "fsdp"])
def test_uneven_shares_cut_into_uneven_parts_are_one_run(tmp_path, how):
    uneven = {**how, "train.batch": "23", "engine.accumulate": "2"}  # 7, 8 and 8 images: 3 + 4, 4 + 4, 4 + 4
    go(3, tmp_path / "three", uneven)
    alone(tmp_path / "one", {"train.batch": "23"})
    assert_close(tmp_path / "three", tmp_path / "one")


# ---------------------------------------------------------------- Muon


def restored_and_written(self, folder, restore=Trainer.restore):
    """Trainer.restore, which also writes what it has read, to RUN.again."""
    restore(self, folder)
    if (write := self.snapshot()) is not None:
        again = folder.parents[1].with_suffix(".again")
        again.mkdir()
        write(again)


@pytest.fixture
def muon(shared):
    return shared("muon", lambda run: alone(run, MUON))


@pytest.fixture
def muon_fsdp(shared):
    return shared("muon-fsdp", lambda run: go(2, run, {**MUON, **FSDP}))


def test_muon_in_two_processes_with_shards_is_one_run(muon_fsdp, muon):
    assert_close(muon_fsdp, muon)


def test_muon_in_two_processes_with_copies_is_one_run(muon, tmp_path):
    go(2, tmp_path / "copies", MUON)
    assert_close(tmp_path / "copies", muon)


def test_muon_goes_on_in_shards_and_out_of_them(muon, muon_fsdp, tmp_path, monkeypatch):
    """What either has read of the other's checkpoint is that, to the bit."""
    script, run = tmp_path / "again.py", cut(muon, tmp_path / "shards")
    imports = "from mvm.cli import main\nfrom mvm.training.trainer import Trainer\n"
    patched = "Trainer.restore = restored_and_written\nmain()\n"
    script.write_text(imports + inspect.getsource(restored_and_written) + patched)
    with started(2, run, {**MUON, **FSDP}, "--resume", program=(str(script),)) as work:
        assert work.wait() == 0, work.output[-4000:]
    assert distance(run.with_suffix(".again"), cut(muon, tmp_path / "before")) == 0
    assert_close(run, muon)
    run = cut(muon_fsdp, tmp_path / "alone")
    monkeypatch.setattr(Trainer, "restore", restored_and_written)
    alone(run, MUON, resume=True)
    assert distance(run.with_suffix(".again"), cut(muon_fsdp, tmp_path / "sharded")) == 0
    assert_close(run, muon)


def test_muon_goes_on_in_the_same_shards_bit_for_bit(muon_fsdp, tmp_path):
    run = cut(muon_fsdp, tmp_path / "same")
    go(2, run, {**MUON, **FSDP}, "--resume")
    assert_identical(run, muon_fsdp)


@pytest.mark.slow
def test_muon_in_hybrid_shards_is_one_run(muon, tmp_path):
    go(4, tmp_path / "hybrid", {**MUON, **HYBRID})
    assert_close(tmp_path / "hybrid", muon)


# ---------------------------------------------------------------- going on with another number of processes


def test_a_run_goes_on_with_one_process(ddp, fsdp, tmp_path):
    for before in (ddp, fsdp):
        run = cut(before, tmp_path / before.name)
        alone(run, WATCHED, resume=True)
        assert_close(run, before)


@pytest.mark.slow
def test_a_paused_run_goes_on_bit_for_bit(ddp, tmp_path):
    run = tmp_path / "paused"
    go(2, run, WATCHED, "--until", str(HALF))
    assert steps_of(run) == list(range(1, HALF + 1))
    go(2, run, WATCHED, "--resume")
    assert_identical(run, ddp)


@pytest.mark.slow
def test_a_run_goes_on_with_more_processes(ddp, tmp_path):
    run = cut(ddp, tmp_path / "more")
    go(4, run, WATCHED, "--resume")
    assert_close(run, ddp)


@pytest.mark.slow
def test_a_sharded_run_goes_on_with_copies_and_in_other_shards(fsdp, ddp, tmp_path):
    run = cut(fsdp, tmp_path / "copies")
    go(2, run, WATCHED, "--resume")
    assert_close(run, ddp)
    run = cut(ddp, tmp_path / "shards")
    go(4, run, {**WATCHED, **HYBRID}, "--resume")
    assert_close(run, ddp)


# ---------------------------------------------------------------- a worker that dies


def test_a_killed_worker_is_started_again_and_nothing_is_lost(undisturbed, tmp_path):
    run = tmp_path / "killed"
    with started(2, run, LONG, "--auto-resume", launcher=("--standalone", "--max-restarts", "2")) as work:
        work.wait_for_step(run, 40)  # past the checkpoint of step 30
        os.kill(workers(work.process)[1], signal.SIGKILL)
        assert work.wait() == 0, work.output[-4000:]
    assert_identical(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_worker_is_given_up_and_nothing_is_lost(rank, undisturbed, tmp_path):
    """SIGSTOP, as a machine that hangs: the others wait engine.timeout, torchrun then kills it and starts all again."""
    run, options = tmp_path / "stopped", {**LONG, "engine.timeout": "8"}
    launcher = ("--standalone", "--max-restarts", "1", "--shutdown-timeout", "2")
    with started(2, run, options, "--auto-resume", launcher=launcher) as work:
        work.wait_for_step(run, 40)
        os.kill(workers(work.process)[rank], signal.SIGSTOP)
        assert work.wait(2 * PATIENCE) == 0, work.output[-4000:]
    assert_identical(run, undisturbed)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_fewer_processes(undisturbed, tmp_path):
    run = tmp_path / "fewer"
    with started(2, run, LONG) as work:
        work.wait_for_step(run, 40)
        os.kill(workers(work.process)[0], signal.SIGKILL)  # the one that writes
        assert work.wait() == 1
    alone(run, LONG, resume=True)
    assert distance(run, undisturbed) < CLOSE
    assert steps_of(run) == steps_of(undisturbed)


# ---------------------------------------------------------------- two nodes


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def two_nodes(run, options, *flags, meet):
    """Yield two torchrun commands of one process each; meet: how each finds the other."""
    with contextlib.ExitStack() as stack:
        places = [("--nnodes", "2", *words) for words in meet]
        yield [stack.enter_context(started(1, run, options, *flags, launcher=words)) for words in places]


def test_two_nodes_on_loopback_are_one_run(ddp, tmp_path):
    run, port = tmp_path / "nodes", str(free_port())
    meet = [("--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", port) for rank in "01"]
    with two_nodes(run, WATCHED, meet=meet) as nodes:
        assert [node.wait() for node in nodes] == [0, 0], nodes[0].output[-4000:]
    assert_identical(run, ddp)


@pytest.mark.slow
def test_a_killed_worker_of_one_node_restarts_both(undisturbed, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # restarts on several nodes
    run, place = tmp_path / "nodes", f"127.0.0.1:{free_port()}"
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", place, "--local-addr", "127.0.0.1", "--max-restarts", "2")
    with two_nodes(run, LONG, "--auto-resume", meet=[meet, meet]) as nodes:
        nodes[0].wait_for_step(run, 40)
        os.kill(*workers(nodes[1].process).values(), signal.SIGKILL)
        assert [node.wait() for node in nodes] == [0, 0], nodes[0].output[-4000:]
    assert_identical(run, undisturbed)


# ---------------------------------------------------------------- signals


def interrupt(run, number, receivers, step, *flags, code):
    """Send a signal in the middle of a run, which must end torchrun with a code; return the step it saved at."""
    noting = run.with_name("noting.py")
    noting.write_text(NOTING)
    with started(2, run, LONG, *flags, program=(str(noting),)) as work:
        work.wait_for_step(run, step)
        asked = time.monotonic()
        for receiver in receivers(work.process):
            os.kill(receiver, number)
        assert work.wait() == code, work.output[-4000:]
        assert time.monotonic() - asked < GRACE
        assert work.output.count("mvm: stopped; continue with: mvm train --resume") == 1
    saved = checkpoint.read_manifest(checkpoint.latest(run))["step"]
    assert step <= saved == steps_of(run)[-1] < int(LONG["train.steps"])
    return saved


def codes(run):
    return [run.with_name(f"{run.name}.code-{rank}").read_text() for rank in range(2)]


def launcher(process):
    return [process.pid]


def every_worker(process):
    return workers(process).values()


def second_worker(process):
    return [workers(process)[1]]


def test_signals_save_and_the_run_goes_on(undisturbed, tmp_path):
    """SIGTERM and Ctrl-C to torchrun: workers stand in sessions of their own, and torchrun passes the signal on.

    torchrun's own code is 1 after any signal to itself, whatever its workers say.
    """
    run = tmp_path / "signals"
    first = interrupt(run, signal.SIGTERM, launcher, 20, code=1)
    assert codes(run) == ["0", "0"]
    second = interrupt(run, signal.SIGINT, launcher, first + 10, "--resume", code=1)
    assert codes(run) == ["130", "130"]
    assert first < second
    go(2, run, LONG, "--resume")
    assert_identical(run, undisturbed)


def test_sigterm_signals_to_workers_end_torchrun_with_0(undisturbed, tmp_path):
    """To all of them, as a scheduler does, then to one alone: the other stops with it, and neither has failed."""
    run = tmp_path / "signals"
    first = interrupt(run, signal.SIGTERM, every_worker, 20, code=0)
    interrupt(run, signal.SIGTERM, second_worker, first + 10, "--resume", code=0)
    assert codes(run) == ["0", "0"]
    go(2, run, LONG, "--resume")
    assert_identical(run, undisturbed)


@pytest.mark.slow
def test_ctrl_c_signals_to_workers_save_too(undisturbed, tmp_path):
    run = tmp_path / "signals"
    first = interrupt(run, signal.SIGINT, every_worker, 20, code=1)
    assert codes(run) == ["130", "130"]
    interrupt(run, signal.SIGINT, second_worker, first + 10, "--resume", code=1)
    assert codes(run) == ["0", "130"]
    go(2, run, LONG, "--resume")
    assert_identical(run, undisturbed)


# ---------------------------------------------------------------- reading checkpoints

# `mvm`, and beside the run how many bytes of checkpoints each process hashed and read
COUNTING = """
import json, os, pathlib, sys
from mvm import checkpoint
from mvm.cli import main
from mvm.distributed.sharding import SharedFile

leave, run, sha256, read = os._exit, sys.argv[sys.argv.index("--out") + 1], checkpoint.sha256, SharedFile._read
count = {"hashed": 0, "read": 0, "largest": 0}

def counted_hash(path, part=None):
    count["hashed"] += path.stat().st_size if part is None else len(part)
    return sha256(path, part)

def counted_read(self, name):
    tensor = read(self, name)
    count["read"] += tensor.nbytes
    count["largest"] = max(count["largest"], tensor.nbytes)
    return tensor

def end(code):
    pathlib.Path(f"{run}.count-{os.environ['RANK']}").write_text(json.dumps(count))
    leave(code)

checkpoint.sha256, SharedFile._read, os._exit = counted_hash, counted_read, end
main()
"""


@pytest.mark.parametrize("options", [{}, pytest.param(FSDP, marks=pytest.mark.slow)], ids=["ddp", "fsdp"])
def test_each_process_checks_and_reads_its_share_of_a_checkpoint(options, tmp_path, monkeypatch):
    run, block = tmp_path / "run", 4096
    monkeypatch.setattr(checkpoint, "BLOCK", block)
    alone(run, {**options, "train.steps": "2"})
    files = list(checkpoint.latest(run).glob("*.safetensors"))
    assert checkpoint.read_manifest(checkpoint.latest(run))["blocks"]["bytes"] == block
    total, numbers = sum(path.stat().st_size for path in files), sum(value.nbytes for value in weights(run).values())
    program = tmp_path / "counting.py"
    program.write_text(COUNTING)
    with started(2, run, {**options, "train.steps": "2"}, "--resume", program=(str(program),)) as work:
        assert work.wait() == 0, work.output[-4000:]
    counts = [json.loads(run.with_name(f"run.count-{rank}").read_text()) for rank in range(2)]
    assert sum(each["hashed"] for each in counts) == total
    assert all(abs(each["hashed"] - total / 2) <= block for each in counts)
    assert numbers <= sum(each["read"] for each in counts) < 1.01 * numbers  # numbers alone are read by both
    assert all(abs(each["read"] - numbers / 2) <= len(files) * each["largest"] / 2 for each in counts)


def test_what_one_process_finds_damaged_ends_all_alike(tmp_path, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setattr(checkpoint, "BLOCK", 4096)
    alone(run, {"train.steps": "2"})
    path = checkpoint.latest(run) / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    unhurried = ("--standalone", "--monitor-interval", "3")  # else torchrun might end the second before it speaks
    with started(2, run, {"train.steps": "4"}, "--resume", launcher=unhurried) as work:
        assert work.wait() == 1
    said = re.findall(r"mvm: .*optimizer\.safetensors is damaged \(.*", work.output)
    assert len(said) == 2
    assert said[0] == said[1]
    assert steps_of(run) == [1, 2]


# ---------------------------------------------------------------- misuse

MISUSE = {
    "batch": (2, {"train.batch": "1"}, "train.batch=1 is smaller than the 2 processes"),
    "compile": (2, {**FSDP, "engine.compile": "full"}, "engine.compile='full' does not go with engine.parallel='fsdp'"),
    "shard": (3, HYBRID, "engine.shard=2 must divide the 3 processes"),
}
SLOW_MISUSE = [pytest.param(name, marks=pytest.mark.slow) for name in ("compile", "shard")]


def refused(processes, run, options, message):
    with started(processes, run, options) as work:
        assert work.wait() == 1
        assert f"mvm: {message}" in work.output
        assert "exitcode  : 2" in work.output  # in torchrun's summary
        assert "mvm/cli" not in work.output  # no traceback of ours


@pytest.mark.parametrize("name", ["batch", *SLOW_MISUSE])
def test_misuse_ends_every_process_with_a_message(name, tmp_path):
    processes, options, message = MISUSE[name]
    refused(processes, tmp_path / "run", options, message)
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_a_folder_in_use_is_left_alone(ddp):
    before = {path: path.stat().st_mtime_ns for path in ddp.rglob("*")}
    refused(2, ddp, WATCHED, f"{ddp} already holds a run; give --resume to continue it, or another --out")
    assert {path: path.stat().st_mtime_ns for path in ddp.rglob("*")} == before


# ---------------------------------------------------------------- REPA


@pytest.fixture
def encoder(shared):
    """A tiny Dinov2 with random weights, as a folder."""
    transformers = pytest.importorskip("transformers")

    def make(folder):
        torch.manual_seed(0)
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "image_size": 16}
        transformers.Dinov2Model(transformers.Dinov2Config(**size)).save_pretrained(folder)

    return shared("encoder", make)


def test_alignment_under_processes_is_one_run_past_its_end(encoder, tmp_path):
    options = {"repa.encoder": str(encoder), "repa.resolution": "16", "repa.stop": str(HALF), "data.mirror": "yes"}
    alone(tmp_path / "one", options)
    go(2, tmp_path / "ddp", options)
    assert ["repa" in line for line in lines(tmp_path / "ddp")] == [step < HALF for step in range(STEPS)]
    assert any(name.startswith("projector/") for name in weights(tmp_path / "ddp"))
    assert_close(tmp_path / "ddp", tmp_path / "one")
