"""The hub: models by OWNER/NAME. The only module that imports huggingface_hub."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from mvm.options import needs
from mvm.published.format import CARD, FILES, LIBRARY, Config, check_all, version

_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?")
MISSING = needs("the hub", "huggingface_hub", "hub")


class HubId(NamedTuple):
    """OWNER/NAME, and a branch, tag or commit; None: the main branch."""

    repo: str
    revision: str | None


def parse_hub_id(name: str) -> HubId | None:
    """Return what OWNER/NAME or OWNER/NAME@REVISION means; None for anything else."""
    match = _ID.fullmatch(name)
    return HubId(match["repo"], match["revision"]) if match else None


def as_hub_id(name: str) -> HubId | None:
    """Return the hub id that a name is; None for a path: what is here, or would lie in a folder that is here.

    A mistyped runs/NAME must not become a stranger's model; OWNER/NAME@REVISION is always a hub id.
    """
    asked = parse_hub_id(name)
    local = Path(name).exists() or (asked is not None and asked.revision is None and Path(name).parent.is_dir())
    return None if local else asked


def fetch(asked: HubId, **options: Any) -> tuple[Path, Path]:
    """Return the published model of that id, its own files alone, and the folder that links in it lead to.

    ValueErrors say why there is none.

    options: of the hub's library, e.g. token, cache_dir.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import EntryNotFoundError, HTTPError
    except ImportError:
        raise ValueError(MISSING) from None
    try:
        folder = Path(snapshot_download(asked.repo, revision=asked.revision, allow_patterns=list(FILES), **options))
    except (OSError, ValueError, EntryNotFoundError, HTTPError) as error:
        raise ValueError(_reason(error)) from None
    return folder, folder.parent.parent  # CACHE/models--OWNER--NAME/{snapshots/COMMIT, blobs}


def _reason(error: BaseException) -> str:
    """Return what went wrong with the hub, in words."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", 0)
    first_line = next(iter(str(error).splitlines()), type(error).__name__)
    if isinstance(error, errors.GatedRepoError):
        return "the model is gated: ask for access on its page, then log in with: hf auth login"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the hub has no such revision of it"
    if isinstance(error, errors.LocalTokenNotFoundError) or status == 401:
        return "the hub knows no such model, or not who you are; log in with: hf auth login, or set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such model, or shows it to others alone (hf auth login)"
    if status == 403:
        return "this account may not do that there; take an OWNER it belongs to, and a token that may write"
    if isinstance(error, errors.HFValidationError):
        return f"the hub does not take the name ({error})"
    return f"the hub answered {status} ({first_line})" if status else f"the hub cannot be reached ({first_line})"


class Upload(NamedTuple):
    """What a push sends: a checked folder, its files with their bytes, to a branch (None: main) of a repository.

    card: README.md as it is sent, its snippets with the hub id.
    """

    folder: Path
    config: Config
    files: dict[str, int]
    card: bytes
    repo: str
    revision: str | None


def prepare(folder: Path, name: str, *, revision: str | None = None) -> Upload:
    """Return what `push` would send, after every check that needs no connection. What does not load is not sent."""
    asked = parse_hub_id(name)
    if asked is None or asked.revision is not None:
        raise ValueError(f"'{name}' is no hub id; give OWNER/NAME, and a branch with --revision")
    full_name = name if revision is None else f"{name}@{revision}"
    if parse_hub_id(full_name) is None:
        raise ValueError(f"--revision {revision} is no name of a branch; use letters, digits, '.', '_', '-' and '/'")
    try:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id
    except ImportError:
        raise ValueError(MISSING) from None
    try:
        validate_repo_id(asked.repo)
    except HFValidationError as error:
        raise ValueError(f"'{name}': {_reason(error)}") from None
    config, _ = check_all(folder)
    sizes, card = {file: (folder / file).stat().st_size for file in FILES if (folder / file).is_file()}, b""
    if CARD in sizes:
        text, quoted = (folder / CARD).read_text(encoding="utf-8"), r'"(?:[^"\\\n]|\\.)*"([,)])'
        text = re.sub(rf"(mvm\.load|MVMPipeline\.from_pretrained)\({quoted}", rf'\1("{full_name}"\2', text)
        card = re.sub(r"^mvm sample .*? --num", f"mvm sample {full_name} --num", text, flags=re.MULTILINE).encode()
        sizes[CARD] = len(card)
    return Upload(folder, config, sizes, card, asked.repo, revision)


def push(folder: Path, name: str, *, private: bool = False, revision: str | None = None) -> str:
    """Send a published model to the hub as OWNER/NAME; return its address. What does not load is not sent."""
    upload = prepare(folder, name, revision=revision)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    api, repo = HfApi(library_name=LIBRARY, library_version=version()), upload.repo
    try:
        address = str(api.create_repo(repo, private=private, exist_ok=True))
        if private and not api.repo_info(repo).private:  # it was there before, and making it did not change that
            raise ValueError(
                f"--private: {repo} is there already and public; nothing was sent. Change it on the hub first"
            )
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        with TemporaryDirectory() as staged:
            for file in upload.files:
                path = Path(staged) / file
                path.parent.mkdir(exist_ok=True)
                if file == CARD:
                    path.write_bytes(upload.card)
                else:
                    path.symlink_to((folder / file).resolve())
            message = f"{upload.config.recipe.name}, step {upload.config.source.step}"
            patterns: Any = {
                "allow_patterns": [*FILES],
                "delete_patterns": [*FILES],
            }  # no codec of an earlier model stays
            api.upload_folder(repo_id=repo, folder_path=staged, revision=revision, commit_message=message, **patterns)
    except (OSError, HTTPError) as error:
        raise ValueError(f"{folder} was not sent to {repo}: {_reason(error)}") from None
    return address
