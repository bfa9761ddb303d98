"""Hub ids, downloads and uploads, without a network: what is asked of the hub's library, and what its errors become."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import mvm
from mvm.model import is_model
from mvm.published.format import FILES
from mvm.published.hub import HubId, as_hub_id, fetch, parse_hub_id, prepare, push

hub = pytest.importorskip("huggingface_hub", reason="needs mean-velocity-matching[hub]")
errors = pytest.importorskip("huggingface_hub.errors")


def answer(status):
    return SimpleNamespace(status_code=status, headers={}, request=None)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def cached(folder, tmp_path):
    """The export as the hub's cache holds it: links in snapshots/COMMIT to blobs."""
    root = tmp_path / "cache" / "models--owner--name"
    snapshot = root / "snapshots" / "c0ffee"
    (root / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        (root / "blobs" / str(number)).write_bytes(path.read_bytes())
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(os.path.relpath(root / "blobs" / str(number), link.parent))
    return snapshot


def test_names():
    assert parse_hub_id("owner/name") == HubId("owner/name", None)
    assert parse_hub_id("o-w.n/na_me-1.0@refs/pr/1") == HubId("o-w.n/na_me-1.0", "refs/pr/1")
    for other in ("digits", "a/b/c", "/a/b", "./a", "../a", "a/b@", "a/", "a b/c", ""):
        assert parse_hub_id(other) is None


def test_what_is_here_goes_before_the_hub(here, folder, monkeypatch):
    monkeypatch.setattr(hub, "snapshot_download", lambda *args, **options: pytest.fail("asked the hub"))
    (here / "owner").mkdir()
    assert as_hub_id("owner/typo") is None
    assert not is_model("owner/typo")
    with pytest.raises(ValueError, match=r"'owner/typo' is neither .*a model on the hub is OWNER/NAME"):
        mvm.load("owner/typo")
    folder.rename(here / "owner" / "name")
    assert mvm.load("owner/name").origin["step"] == 4
    assert as_hub_id("owner/name@main") == HubId("owner/name", "main")


def test_load_fetches_the_files_of_the_format_alone(here, cached, monkeypatch):
    asked = []

    def download(repo, **options):
        asked.append((repo, options))
        return str(cached)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert is_model("owner/name")
    model = mvm.load("owner/name@v1")
    assert model.origin["run"] == "run"
    assert asked == [("owner/name", {"revision": "v1", "allow_patterns": list(FILES)})]
    (cached / "config.json").unlink()
    (cached / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match="leads out of the folder"):
        mvm.load("owner/name")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.RepositoryNotFoundError("x", response=answer(404)), "the hub has no such model"),
        (errors.RepositoryNotFoundError("x", response=answer(401)), "hf auth login"),
        (errors.GatedRepoError("x", response=answer(403)), "is gated"),
        (errors.RevisionNotFoundError("x", response=answer(404)), "no such revision"),
        (errors.LocalEntryNotFoundError("no cache\nmore"), r"cannot be reached \(no cache\)"),
        (errors.OfflineModeIsEnabled("offline"), r"cannot be reached \(offline\)"),
        (errors.HfHubHTTPError("busy", response=answer(503)), "the hub answered 503"),
        (errors.HFValidationError("long"), "does not take the name"),
    ],
)
def test_errors_name_the_three_ways(here, monkeypatch, error, words):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    ways = r"neither a run directory .* nor an exported model .* nor a shipped one.*; shipped: .*digits.*; from the hub"
    with pytest.raises(ValueError, match=f"'owner/name' is {ways}.*{words}"):
        mvm.load("owner/name")


def test_offline_for_real(here, monkeypatch):
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="the hub cannot be reached"):
        fetch(HubId("owner/name-that-is-not-there", None))


class Api:
    """What `push` asks of the hub, written down."""

    def __init__(self, *, public=False, error=None):
        self.public, self.error, self.asked = public, error, []

    def __call__(self, **options):
        self.made = options
        return self

    def create_repo(self, repo, **options):
        if self.error is not None:
            raise self.error
        self.asked.append(("create", repo, options))
        return f"https://hub/{repo}"

    def repo_info(self, repo):
        return SimpleNamespace(private=not self.public)

    def create_branch(self, repo, **options):
        self.asked.append(("branch", repo, options))

    def upload_folder(self, **options):
        self.asked.append(("upload", options["repo_id"], options))
        root = Path(options["folder_path"])
        self.sent = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def api(monkeypatch):
    def make(**options):
        made = Api(**options)
        monkeypatch.setattr(hub, "HfApi", made)
        return made

    return make


def test_push(folder, api):
    found = api()
    assert push(folder, "owner/name", private=True, revision="v1") == "https://hub/owner/name"
    create, branch, upload = found.asked
    assert create == ("create", "owner/name", {"private": True, "exist_ok": True})
    assert branch == ("branch", "owner/name", {"branch": "v1", "exist_ok": True})
    there = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    card = found.sent["README.md"].decode()
    assert {**found.sent, "README.md": b""} == {**there, "README.md": b""}
    assert 'mvm.load("owner/name@v1")' in card
    assert 'MVMPipeline.from_pretrained("owner/name@v1")' in card
    assert "mvm sample owner/name@v1 --num 16" in card
    assert there["README.md"].decode() == card.replace("owner/name@v1", "model")
    assert upload[2]["revision"] == "v1"
    assert upload[2]["allow_patterns"] == list(FILES)
    assert upload[2]["delete_patterns"] == list(FILES)  # what an earlier model left there
    assert upload[2]["commit_message"] == "digits, step 4"
    assert found.made == {"library_name": "mvm", "library_version": mvm.__version__}
    plain = api()
    push(folder, "owner/name")
    assert [call[0] for call in plain.asked] == ["create", "upload"]


def test_nothing_private_is_sent_to_a_public_place(folder, api):
    found = api(public=True)
    with pytest.raises(ValueError, match=r"--private: owner/name.*public.*nothing was sent"):
        push(folder, "owner/name", private=True)
    assert [call[0] for call in found.asked] == ["create"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.LocalTokenNotFoundError("no token"), "hf auth login, or set HF_TOKEN"),
        (errors.HfHubHTTPError("x", response=answer(401)), "hf auth login, or set HF_TOKEN"),
        (errors.HfHubHTTPError("x", response=answer(403)), "this account may not do that there"),
        (errors.OfflineModeIsEnabled("offline"), r"the hub cannot be reached \(offline\)"),
        (ConnectionError("no route"), r"the hub cannot be reached \(no route\)"),
    ],
)
def test_push_errors(folder, api, error, words):
    api(error=error)
    with pytest.raises(ValueError, match=rf"model was not sent to owner/name: .*{words}"):
        push(folder, "owner/name")


def test_prepare_says_what_would_be_sent(folder, api):
    (folder / "LICENSE").write_text("mine")  # lies beside the format, and is not sent
    found, asked = prepare(folder, "owner/name"), api()
    push(folder, "owner/name", private=True)
    assert found.files == {name: len(data) for name, data in asked.sent.items()}
    assert (found.repo, found.revision) == ("owner/name", None)
    for name, revision, words in (
        ("name", None, "'name' is no hub id"),
        ("owner/a--b", None, "the hub does not take the name"),
        ("owner/name", "a b", "--revision a b is no name of a branch"),
    ):
        with pytest.raises(ValueError, match=words):
            prepare(folder, name, revision=revision)


def test_push_of_what_is_no_model(run, folder, api):
    found = api()
    for name in ("name", "a/b/c", "owner/name@v1"):
        with pytest.raises(ValueError, match=f"'{name}' is no hub id"):
            push(folder, name)
    with pytest.raises(ValueError, match="is not read"):
        push(run, "owner/name")
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="no whole safetensors file"):
        push(folder, "owner/name")
    assert found.asked == []
