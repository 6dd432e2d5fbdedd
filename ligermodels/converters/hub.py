"""Turn a hub id or a local path into a local folder; download only the files that are needed."""

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
    """Return the folder of a local checkpoint, or the cached snapshot of a hub id.

    The hub is asked once for the commit of the revision, and all files come from that commit.
    HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and a login work as in huggingface_hub. Without a
    connection, this returns the cached snapshot if it is complete.

    Args:
        name_or_path: a folder, or an id such as "meta-llama/Llama-3.2-1B".
        revision: a branch, tag or commit of a hub id. The default is the main branch.
        weights: if False, download only the config and tokenizer files.
    Raises:
        CheckpointError: the folder or repository does not exist, is gated or has no weights that
            can be read, or there is no connection and the cache has no complete copy. The message
            says what to do.
    """
    name = os.fspath(name_or_path)
    if not name:
        raise CheckpointError("the model's name is empty; pass a folder or a hub id")
    folder = Path(os.path.expanduser(name))
    if recover_dir(folder):
        if revision is not None:
            raise CheckpointError(
                f"{name}: this is a local folder, so revision {revision!r} cannot apply; leave "
                "the revision out"
            )
        return folder
    if os.path.exists(folder):
        raise CheckpointError(f"{name}: this is a file; pass the folder that holds {CONFIG_NAME}")
    if isinstance(name_or_path, os.PathLike) or not _REPO_ID.fullmatch(name):
        raise CheckpointError(
            f"{printable(name)}: there is no such folder, and the name is not a possible hub id"
        )
    return _fetch(name, revision, weights)


def _fetch(repo: str, revision: str | None, weights: bool) -> Path:
    """Download the files that are needed, and return the snapshot folder."""
    # The import is slow, and local folders do not need it.
    import huggingface_hub
    from huggingface_hub import errors

    try:
        info = huggingface_hub.HfApi().model_info(repo, revision=revision)
    except errors.GatedRepoError as fault:
        raise _gated(repo) from fault
    except errors.RepositoryNotFoundError as fault:
        raise CheckpointError(
            f"{repo}: there is no such local folder and no such model on the hub, or the model is "
            "private; check the spelling, or log in with `hf auth login` (or set HF_TOKEN)"
        ) from fault
    except errors.RevisionNotFoundError as fault:
        raise CheckpointError(
            f"{repo}: the repository has no revision {revision!r}; pass a branch, tag or commit"
        ) from fault
    except errors.HFValidationError as fault:
        raise CheckpointError(
            f"{repo}: there is no such folder, and the name is not a valid hub id"
        ) from fault
    except Exception as fault:  # A missing connection raises many kinds of errors.
        return _cached(repo, revision, weights, fault)

    commit = info.sha
    names = {sibling.rfilename for sibling in info.siblings or ()}
    if CONFIG_NAME not in names and weights:
        raise CheckpointError(
            f"{repo}/{CONFIG_NAME}: the file is missing on the hub in commit {commit}"
        )

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
    except Exception as fault:  # Examples: a full disk, a lost connection, a server error.
        raise CheckpointError(
            f"{repo}: the model could not be downloaded: {first_line(fault)}; try again: what "
            "was downloaded is kept"
        ) from fault
    _remember(Path(snapshot), revision or "main", commit)
    return Path(snapshot)


def _remember(snapshot: Path, revision: str, commit: str | None) -> None:
    """Record the commit of a branch in the cache, for later runs without a connection."""
    if commit and revision != commit and not commit.startswith(revision):
        ref = snapshot.parent.parent / "refs" / revision
        with contextlib.suppress(OSError):  # A read-only cache still works.
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit)


def _gated(repo: str) -> CheckpointError:
    return CheckpointError(
        f"{repo}: the model is gated; accept its licence at https://huggingface.co/{repo} and log "
        "in with `hf auth login` (or set HF_TOKEN)"
    )


def _cached(repo: str, revision: str | None, weights: bool, fault: Exception) -> Path:
    """Return the snapshot that an earlier run left in the cache, if it is complete."""
    import huggingface_hub
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    reason = "HF_HUB_OFFLINE is set" if offline else f"there is no connection ({first_line(fault)})"
    way_out = "unset HF_HUB_OFFLINE" if offline else "connect"
    found = huggingface_hub.try_to_load_from_cache(repo, CONFIG_NAME, revision=revision)
    if not isinstance(found, str):
        raise CheckpointError(
            f"{repo}: there is no such local folder, {reason}, and nothing is cached; "
            f"{way_out} to download the model, or pass the path of a local folder"
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
        logger.warning("%s: %s; ligermodels is using the cached copy", repo, reason)
    return folder
