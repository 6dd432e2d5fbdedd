"""Turn a hub id or a local path into a local folder; download only the files that are needed."""

import logging
import os
import re
from pathlib import Path
from typing import Any, TypedDict

from typing_extensions import Unpack

from ligermodels.converters.checkpoint_files import (
    CHAT_TEMPLATE_DIR,
    CHAT_TEMPLATE_FILE,
    CONFIG_NAME,
    COPIED_FILES,
    GENERATION_CONFIG_NAME,
    HEADS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    local_weight_files,
    weight_files,
)
from ligermodels.converters.files import read_json
from ligermodels.converters.hub_snapshot import COMMIT, Snapshot, is_damaged
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
_TEMPLATE = re.compile(rf"{CHAT_TEMPLATE_DIR}/[\w-][\w.-]*")
_REPO_ID = re.compile(r"[\w-][\w.-]{,95}(/[\w-][\w.-]{,95})?")
# What callers of `resolve` take beside the options, for suggestions.
_ARGUMENTS = ("dtype", "device", "revision", "allow_nonfinite")
# Characters that git allows in no name of a branch or tag.
_NOT_IN_REVISIONS = frozenset(" ~^:?*[\\")
# Without a connection, a cache that lacks one of these must know that the repository lacks it too:
# without it the model would stop at other tokens, or the tokenizer would give other ids.
_MUST_BE_KNOWN = (
    GENERATION_CONFIG_NAME,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE_FILE,
)


class HubOptions(TypedDict, total=False):
    """How the files of a hub id are fetched. They have no effect on a local folder.

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
    A file whose content contradicts the size or a checksum that the hub gives for it is refused.
    A cached file that was damaged is downloaded again. HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and a
    login work as in huggingface_hub. If the hub cannot be reached, this returns the cached snapshot
    if it is complete.

    Args:
        name_or_path: a folder, or an id such as "meta-llama/Llama-3.2-1B".
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
    if revision is not None and not _is_revision(revision):
        raise CheckpointError(
            f"{name}: revision {short_repr(revision)} is not a possible name; pass a branch, tag "
            "or commit of the repository"
        )
    return _fetch(name, revision, weights, **options)


def _is_revision(name: str) -> bool:
    """Return whether git allows this name. A name with ".." would lead out of the cache."""
    return (
        len(name) <= 255
        and name.isprintable()
        and ".." not in name
        and not _NOT_IN_REVISIONS & set(name)
        and all(part and part[0] not in ".-" for part in name.split("/"))
    )


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
    except errors.HFValidationError as fault:
        raise CheckpointError(
            f"{repo}: there is no such folder, and the name is not a valid hub id"
        ) from fault
    except Exception as fault:  # A missing connection raises many kinds of errors.
        return _cached(repo, revision, weights, cache, fault)

    # The commit becomes a folder's name in the cache.
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise CheckpointError(
            f"{repo}: the hub names {short_repr(commit)} as the commit, which is no commit; check "
            "HF_ENDPOINT and the proxy"
        )
    if revision is not None and COMMIT.fullmatch(revision) and revision != commit:
        raise CheckpointError(
            f"{repo}: the hub answers with commit {commit} instead of {revision}; check "
            "HF_ENDPOINT and the proxy"
        )
    if CONFIG_NAME not in said and weights:
        raise CheckpointError(
            f"{repo}/{CONFIG_NAME}: the file is missing on the hub in commit {commit}"
        )
    names = [name for name in said if isinstance(name, str)]
    snapshot = Snapshot(repo, commit, said, cache, token)

    def read_index() -> dict[str, Any]:
        snapshot.download([SAFE_WEIGHTS_INDEX_NAME])
        return read_json(snapshot.folder / SAFE_WEIGHTS_INDEX_NAME, CheckpointError)

    try:
        wanted = [CONFIG_NAME, *COPIED_FILES]
        if weights:
            files, shard_of = weight_files(repo, names, read_index)
            wanted += files if shard_of is None else [SAFE_WEIGHTS_INDEX_NAME, *files]
            wanted.append(HEADS_NAME)
        snapshot.download([n for n in names if n in wanted or _TEMPLATE.fullmatch(n)])
    except CheckpointError:
        raise
    except errors.GatedRepoError as fault:
        raise _gated(repo) from fault
    except Exception as fault:  # Examples: a full disk, a lost connection, a server error.
        raise CheckpointError(
            f"{repo}: the model could not be downloaded: {first_line(fault)}; try again: what "
            "was downloaded is kept"
        ) from fault
    snapshot.remember(revision or "main")
    return snapshot.folder


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
    present = {CONFIG_NAME}
    if weights:
        try:
            present.update(local_weight_files(folder)[0])
            if os.path.lexists(heads := folder / HEADS_NAME):
                if not heads.exists():
                    raise CheckpointError(f"{heads}: a link to a file that is not there")
                present.add(HEADS_NAME)
        except CheckpointError as incomplete:
            raise CheckpointError(
                f"{repo}: {reason}, and the cached copy is incomplete; {way_out} to download the "
                f"rest\n  {incomplete}"
            ) from fault
    unknown = []
    for name in COPIED_FILES:
        cached = huggingface_hub.try_to_load_from_cache(repo, name, cache, folder.name)
        if isinstance(cached, str):
            present.add(name)
        elif cached is None and name in _MUST_BE_KNOWN:
            unknown.append(name)
    if unknown:
        raise CheckpointError(
            f"{repo}: {reason}, and {unknown[0]} was never downloaded, so that it is unknown "
            f"whether the repository has such a file; {way_out} once, or pass the folder {folder} "
            f"to load it without\n{listing(unknown)}"
        ) from fault
    if damaged := sorted(name for name in present if is_damaged(folder / name)):
        blob = (folder / damaged[0]).resolve()
        raise CheckpointError(
            f"{repo}/{damaged[0]}: the cached copy is damaged, and {reason}; {way_out} to download "
            f"it again, or delete {blob}\n{listing(damaged)}"
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
    if isinstance(fault, errors.HfHubHTTPError):
        reason = f"the hub refuses the request ({first_line(fault)})"
        if getattr(fault.response, "status_code", None) in (401, 403):
            return reason, "log in again with `hf auth login` (or set HF_TOKEN)"
        return reason, "try again later"
    if isinstance(fault, (ValueError, TypeError, LookupError, AttributeError, RecursionError)):
        return (
            f"the hub's answer cannot be understood ({first_line(fault)})",
            "check HF_ENDPOINT and the proxy",
        )
    return f"there is no connection ({first_line(fault)})", "connect"
