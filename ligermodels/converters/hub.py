"""Turn a hub id or a local path into a local folder; download only the files that are needed.

The files go into huggingface_hub's cache. Each is compared once, when it has come, with the size
and the checksum that the hub's API gives for it: the SHA-256 of a large file, the git id (a SHA-1)
of a small one. From then on only its size is looked at.
"""

import contextlib
import hashlib
import logging
import os
import re
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

from typing_extensions import Unpack

from ligermodels.converters.files import (
    ADDED_WEIGHTS,
    CHAT_TEMPLATE_DIR,
    CHAT_TEMPLATE_FILE,
    CONFIG_NAME,
    COPIED_FILES,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    local_weight_files,
    open_if_present,
    read_json,
    weight_files,
)
from ligermodels.converters.save_dir import recover_dir
from ligermodels.errors import (
    CheckpointError,
    did_you_mean,
    first_line,
    listing,
    printable,
    short_repr,
)

logger = logging.getLogger(__name__)
# Short names of models. A folder of such a name in the working directory comes first.
ALIASES = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
_TEMPLATE = re.compile(rf"{CHAT_TEMPLATE_DIR}/[\w-][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# What huggingface_hub.utils.validate_repo_id accepts.
_REPO_ID = re.compile(r"(?!.*(--|\.\.|[-.]/|[-.]$|\.git$))\w[\w.-]{,95}(/\w[\w.-]{,95})?")
# What callers of `resolve` take beside the options, for suggestions.
_ARGUMENTS = ("dtype", "device", "revision", "allow_nonfinite")
# A name with ".." would lead out of the cache.
_REVISION = re.compile(r"(?!.*\.\.)\w[\w.+@=#-]*(/\w[\w.+@=#-]*)*")
# Without a connection, a cache that lacks one of these must know that the repository lacks it too:
# without it the model would stop at other tokens or lack heads, or the tokenizer give other ids.
_MUST_BE_KNOWN = (
    GENERATION_CONFIG_NAME,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE_FILE,
    *ADDED_WEIGHTS,
)


class HubOptions(TypedDict, total=False):
    """Options for fetching the files of a hub id. They have no effect on a local folder.

    Attributes:
        token: a token to log in with, or False for none. The default is that of `hf auth login`.
        cache_dir: the folder for downloads. The default is that of huggingface_hub.
        local_files_only: whether to take what is in cache_dir, without a question to the hub.
    """

    token: str | bool | None
    cache_dir: str | os.PathLike[str] | None
    local_files_only: bool


def split_hub_options(options: dict[str, Any]) -> HubOptions:
    """Remove the `HubOptions` from the keyword arguments of a function, and return them."""
    names = HubOptions.__annotations__.keys() & options.keys()
    return {name: options.pop(name) for name in names}  # type: ignore[return-value]


def resolve(
    name_or_path: str | os.PathLike[str],
    revision: str | None = None,
    *,
    weights: bool = True,
    **options: Unpack[HubOptions],
) -> Path:
    """Return the folder of a local checkpoint, or the cached snapshot of a hub id.

    The hub is asked once for the commit of the revision, and all files come from that commit.
    A file that comes with another size or checksum than the hub says is refused, and a cached file
    of another size is downloaded again. HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and a
    login work as in huggingface_hub. If the hub cannot be reached, this returns the cached snapshot
    if it is complete.

    Args:
        name_or_path: a folder, an id such as "meta-llama/Llama-3.2-1B", or a name in `ALIASES`.
        revision: a branch, tag or commit of a hub id. The default is the main branch.
        weights: if False, download only the config and tokenizer files.
        options: see `HubOptions`.
    Raises:
        TypeError: there is no such option.
        CheckpointError: the folder or repository does not exist, is gated or has no weights that
            can be read; the hub cannot be reached and the cache has no complete copy; or what the
            hub sent contradicts what it says of it. The message says what to do.
    """
    for word in options.keys() - HubOptions.__annotations__.keys():
        hint = did_you_mean(word, [*_ARGUMENTS, *HubOptions.__annotations__])
        raise TypeError(f"unexpected keyword argument {word!r}{hint}")
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
    if re.fullmatch(r"checkpoint-\d+", folder.name) and os.path.lexists(folder.parent / "run.json"):
        raise CheckpointError(
            f"{name}: this is a checkpoint of a run, not a model; write it as a model with "
            "'ligermodels convert', or pass the folder model/ of the run when the run is done"
        )
    if isinstance(name_or_path, os.PathLike) or not _REPO_ID.fullmatch(name):
        raise CheckpointError(
            f"{printable(name)}: there is no such folder, and the name is not a possible hub id"
        )
    if revision is not None and (len(revision) > 255 or not _REVISION.fullmatch(revision)):
        raise CheckpointError(
            f"{name}: revision {short_repr(revision)} is not a possible name; pass a branch, tag "
            "or commit of the repository"
        )
    repo = ALIASES.get(name, name)
    try:
        return _fetch(repo, revision, weights, **options)
    except CheckpointError as error:
        if repo == name:
            raise
        raise CheckpointError(
            f"{name} is an alias, and a folder {name} in the working directory takes its place "
            f"(python examples/{name}.py {name} makes it without the hub); {error}"
        ) from error


def _fetch(
    repo: str,
    revision: str | None,
    weights: bool,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Path:
    """Download the files that are needed, and return the snapshot folder."""
    # The import is slow, and local folders do not need it.
    import huggingface_hub
    from huggingface_hub import constants, errors
    from huggingface_hub.file_download import repo_folder_name

    cache = Path(cache_dir or constants.HF_HUB_CACHE).expanduser().resolve()
    if local_files_only:
        return _cached(repo, revision, weights, cache, None)
    try:
        api = huggingface_hub.HfApi(token=token)
        info = api.model_info(repo, revision=revision, files_metadata=True)
        commit = info.sha
        said = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    except errors.GatedRepoError as fault:
        raise _gated(repo) from fault
    except errors.RepositoryNotFoundError as fault:
        raise CheckpointError(
            f"{repo}: there is no such local folder and no such model on the hub, or the model is "
            "private; check the spelling, or log in with `hf auth login` (or set HF_TOKEN, or pass "
            "token)"
        ) from fault
    except errors.RevisionNotFoundError as fault:
        raise CheckpointError(
            f"{repo}: the repository has no revision {revision!r}; pass a branch, tag or commit"
        ) from fault
    except Exception as fault:  # A missing connection raises many kinds of errors.
        return _cached(repo, revision, weights, cache, fault)

    # The commit becomes a folder's name in the cache.
    asked = revision if revision and _COMMIT.fullmatch(revision) else commit
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit) or commit != asked:
        raise CheckpointError(
            f"{repo}: the hub answers with {short_repr(commit)}, expected the commit of "
            f"{revision or 'main'}; check HF_ENDPOINT and the proxy"
        )
    if CONFIG_NAME not in said and weights:
        raise CheckpointError(
            f"{repo}/{CONFIG_NAME}: the file is missing on the hub in commit {commit}"
        )
    names = [name for name in said if isinstance(name, str)]
    storage = cache / repo_folder_name(repo_id=repo, repo_type="model")
    folder = storage / "snapshots" / commit

    def download(name: str) -> None:
        path, why = folder / name, "it was not sent"
        if _contradiction(path, said[name], whole=False) is None:
            return  # It was checked when it came.
        for _ in range(2):
            huggingface_hub.hf_hub_download(
                repo,
                name,
                revision=commit,
                cache_dir=cache,
                token=token,
                force_download=path.exists(),
            )
            found = _contradiction(path, said[name], whole=True)
            if found is None:
                return
            why = found
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise CheckpointError(
            f"{repo}/{name}: the file is not what the hub says it is: {why}; try again, and check "
            "HF_ENDPOINT and the proxy if that does not help"
        )

    def read_index() -> dict[str, Any]:
        download(SAFE_WEIGHTS_INDEX_NAME)
        return read_json(folder / SAFE_WEIGHTS_INDEX_NAME, CheckpointError)

    try:
        wanted = [CONFIG_NAME, *COPIED_FILES]
        if weights:
            wanted += [*weight_files(repo, names, read_index)[0], *ADDED_WEIGHTS]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(download, [n for n in names if n in wanted or _TEMPLATE.fullmatch(n)]))
    except CheckpointError:
        raise
    except errors.GatedRepoError as fault:
        raise _gated(repo) from fault
    except Exception as fault:  # Examples: a full disk, a lost connection, a server error.
        raise CheckpointError(
            f"{repo}: the model could not be downloaded: {first_line(fault)}; try again: what "
            "was downloaded is kept"
        ) from fault
    with contextlib.suppress(OSError):  # A read-only cache still works.
        _remember(storage, revision or "main", commit, said)
    return folder


def _contradiction(path: Path, said: Any, whole: bool) -> str | None:
    """Return how a file contradicts its entry of the hub's API, or None.

    Args: whole tells whether to read all bytes.
    """
    if not path.exists():
        return "it was not sent"
    size = path.stat().st_size
    for claimed in (said.size, said.lfs and said.lfs.size):
        if claimed not in (None, size):
            return f"it has {size} bytes, and the hub says {short_repr(claimed)}"
    if not whole:
        return None
    if said.lfs:
        kind, claimed, digest = "SHA-256", said.lfs.sha256, hashlib.sha256()
    else:
        kind, claimed, digest = "git id", said.blob_id, hashlib.sha1(usedforsecurity=False)
        digest.update(b"blob %d\0" % size)
    with path.open("rb", buffering=0) as file:
        while claimed is not None and (piece := file.read(1 << 20)):
            digest.update(piece)
    if claimed in (None, digest.hexdigest()):
        return None
    return f"its {kind} is {digest.hexdigest()}, and the hub says {short_repr(claimed)}"


def _remember(storage: Path, revision: str, commit: str, said: Mapping[str, Any]) -> None:
    """Record the commit of a branch, and which files the repository lacks, for runs offline."""
    names = (*COPIED_FILES, *ADDED_WEIGHTS)
    records = {storage / ".no_exist" / commit / n: "" for n in names if n not in said}
    if revision != commit:
        records[storage / "refs" / revision] = commit
    for path, text in records.items():  # huggingface_hub writes the same.
        if text or not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
            fresh.write_text(text)
            os.replace(fresh, path)


def _gated(repo: str) -> CheckpointError:
    return CheckpointError(
        f"{repo}: the model is gated; accept its licence at https://huggingface.co/{repo} and log "
        "in with `hf auth login` (or set HF_TOKEN, or pass token)"
    )


def _cached(
    repo: str, revision: str | None, weights: bool, cache: Path, fault: Exception | None
) -> Path:
    """Return the snapshot that an earlier run left in the cache, if it is complete.

    Args: fault: why the hub did not answer; None if it was not asked.
    """
    import huggingface_hub
    from huggingface_hub import constants

    reason, way_out = _why_unreachable(fault)
    found = huggingface_hub.try_to_load_from_cache(repo, CONFIG_NAME, cache, revision)
    if not isinstance(found, str):
        raise CheckpointError(
            f"{repo}: there is no such local folder, {reason}, and nothing is cached; "
            f"{way_out} to download the model, or pass the path of a local folder"
        ) from fault
    folder = Path(found).parent
    if weights:
        try:
            local_weight_files(folder)
            for name in ADDED_WEIGHTS:
                if (added := open_if_present(folder / name, CheckpointError)) is not None:
                    added.close()
        except CheckpointError as incomplete:
            raise CheckpointError(
                f"{repo}: {reason}, and the cached copy is incomplete; {way_out} to download the "
                f"rest\n  {incomplete}"
            ) from fault
    look_for = huggingface_hub.try_to_load_from_cache
    wanted = _MUST_BE_KNOWN if weights else set(_MUST_BE_KNOWN) - {*ADDED_WEIGHTS}
    if unknown := [n for n in wanted if look_for(repo, n, cache, folder.name) is None]:
        raise CheckpointError(
            f"{repo}: {reason}, and {unknown[0]} was never downloaded, so that it is unknown "
            f"whether the repository has such a file; {way_out} once, or pass the folder {folder} "
            f"to load it without\n{listing(unknown)}"
        ) from fault
    if fault is not None and not constants.HF_HUB_OFFLINE:
        logger.warning("%s: %s; ligermodels is using the cached copy", repo, reason)
    return folder


def _why_unreachable(fault: Exception | None) -> tuple[str, str]:
    """Return why the hub gave no answer that can be used, and what the user can do."""
    from huggingface_hub import constants, errors

    if fault is None:
        return "local_files_only is set", "leave local_files_only out"
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"
    response = getattr(fault, "response", None)
    if isinstance(fault, errors.HfHubHTTPError) and response is not None:
        way = "log in again with `hf auth login` (or set HF_TOKEN), or try again later"
        return f"the hub refuses the request ({first_line(fault)})", way
    reason = f"there is no connection, or no answer that can be read ({first_line(fault)})"
    return reason, "connect (and check HF_ENDPOINT and the proxy)"
