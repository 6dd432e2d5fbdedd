"""A hub id or a local path to a local folder; only the files that are needed are downloaded."""

import contextlib
import logging
import os
import re
from pathlib import Path
from typing import Any

from ligermodels.converters.atomic_dir import recover_dir
from ligermodels.converters.checkpoint_files import (
    CHAT_TEMPLATE_DIR,
    CONFIG_NAME,
    COPIED_FILES,
    SAFE_WEIGHTS_INDEX_NAME,
    local_weight_files,
    weight_files,
)
from ligermodels.converters.files import read_json
from ligermodels.errors import CheckpointError, first_line, printable

logger = logging.getLogger(__name__)
_TEMPLATE = re.compile(rf"{CHAT_TEMPLATE_DIR}/[\w-][\w.-]*")
_REPO_ID = re.compile(r"[\w-][\w.-]{,95}(/[\w-][\w.-]{,95})?")


def resolve(
    name_or_path: str | os.PathLike[str], revision: str | None = None, *, weights: bool = True
) -> Path:
    """The folder of a local checkpoint, or the cached snapshot of a hub id.

    The revision is turned into a commit once, and every file comes from that commit.
    HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and a login work as in huggingface_hub. Without a
    connection, a complete cached snapshot is used.

    Args:
        name_or_path: a folder, or an id such as "meta-llama/Llama-3.2-1B".
        revision: branch, tag or commit of a hub id; default its main branch.
        weights: False downloads the config and tokenizer files only.
    Raises:
        CheckpointError: there is no such folder or repository, it is gated, there is no connection
            and nothing cached, or it has no weights that can be read; the message says what to do.
    """
    name = os.fspath(name_or_path)
    if not name:
        raise CheckpointError("the model's name is empty; give a folder or a hub id")
    folder = Path(os.path.expanduser(name))
    recover_dir(folder)
    if os.path.isdir(folder):
        if revision is not None:
            raise CheckpointError(
                f"{name}: is a local folder, to which revision {revision!r} cannot apply"
            )
        return folder
    if os.path.exists(folder):
        raise CheckpointError(f"{name}: is a file; give the folder that holds {CONFIG_NAME}")
    if isinstance(name_or_path, os.PathLike) or not _REPO_ID.fullmatch(name):
        raise CheckpointError(
            f"{printable(name)}: there is no such folder, and it cannot be a hub id"
        )
    return _fetch(name, revision, weights)


def _fetch(repo: str, revision: str | None, weights: bool) -> Path:
    """Download the files that are needed; return the snapshot folder."""
    # This import takes a while, and local folders do not need it.
    import huggingface_hub
    from huggingface_hub import errors

    try:
        info = huggingface_hub.HfApi().model_info(repo, revision=revision)
    except errors.GatedRepoError as fault:
        raise _gated(repo) from fault
    except errors.RepositoryNotFoundError as fault:
        raise CheckpointError(
            f"{repo}: there is no such folder here and no such model on the hub, or it is "
            "private; check the spelling, or log in with `hf auth login` (or set HF_TOKEN)"
        ) from fault
    except errors.RevisionNotFoundError as fault:
        raise CheckpointError(f"{repo}: has no revision {revision!r}") from fault
    except errors.HFValidationError as fault:
        raise CheckpointError(f"{repo}: is no folder here and no valid hub id") from fault
    except Exception as fault:  # There are many ways to have no connection.
        return _cached(repo, revision, weights, fault)

    commit = info.sha
    names = {sibling.rfilename for sibling in info.siblings or ()}
    if CONFIG_NAME not in names and weights:
        raise CheckpointError(f"{repo}/{CONFIG_NAME}: is missing on the hub, revision {commit}")

    def read_index() -> dict[str, Any]:
        path = huggingface_hub.hf_hub_download(repo, SAFE_WEIGHTS_INDEX_NAME, revision=commit)
        return read_json(Path(path), CheckpointError)

    try:
        wanted = [CONFIG_NAME, *COPIED_FILES]
        if weights:
            files, shard_of = weight_files(repo, names, read_index)
            wanted += files if shard_of is None else [SAFE_WEIGHTS_INDEX_NAME, *files]
        present = [n for n in names if n in wanted or _TEMPLATE.fullmatch(n)]
        snapshot = huggingface_hub.snapshot_download(repo, revision=commit, allow_patterns=present)
    except CheckpointError:
        raise
    except errors.GatedRepoError as fault:
        raise _gated(repo) from fault
    except Exception as fault:  # disk full, connection lost, server trouble
        raise CheckpointError(
            f"{repo}: could not be downloaded: {first_line(fault)}; what has come is kept, so "
            "try again"
        ) from fault
    _remember(Path(snapshot), revision or "main", commit)
    return Path(snapshot)


def _remember(snapshot: Path, revision: str, commit: str | None) -> None:
    """Write into the cache which commit a branch is at, for later runs without a connection."""
    if commit and revision != commit and not commit.startswith(revision):
        ref = snapshot.parent.parent / "refs" / revision
        with contextlib.suppress(OSError):  # A cache that is read-only is of use, too.
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit)


def _gated(repo: str) -> CheckpointError:
    return CheckpointError(
        f"{repo}: is gated; accept its licence at https://huggingface.co/{repo} and log in with "
        "`hf auth login` (or set HF_TOKEN)"
    )


def _cached(repo: str, revision: str | None, weights: bool, fault: Exception) -> Path:
    """The snapshot that an earlier run has left in the cache, if it is complete."""
    import huggingface_hub
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    reason = "HF_HUB_OFFLINE is set" if offline else f"no connection ({first_line(fault)})"
    way_out = "unset HF_HUB_OFFLINE" if offline else "connect"
    found = huggingface_hub.try_to_load_from_cache(repo, CONFIG_NAME, revision=revision)
    if not isinstance(found, str):
        raise CheckpointError(
            f"{repo}: there is no such folder here, {reason}, and nothing of it is cached; "
            f"{way_out} to download it, or give the path of a local folder"
        ) from fault
    folder = Path(found).parent
    if weights:
        try:
            local_weight_files(folder)
        except CheckpointError as incomplete:
            raise CheckpointError(
                f"{repo}: {reason}, and the cached copy is incomplete; {way_out} to download the "
                f"rest\n  {incomplete}"
            ) from fault
    if not offline:
        logger.warning("%s: %s; using the cached copy", repo, reason)
    return folder
