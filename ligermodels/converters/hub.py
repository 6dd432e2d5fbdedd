"""Turn a hub id or a local path into a local folder; download only the files that are needed.

huggingface_hub downloads them into its cache.
"""

import difflib
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

from typing_extensions import Unpack

from ligermodels.converters.files import (
    ADDED_WEIGHTS,
    CHAT_TEMPLATE_DIR,
    CONFIG_NAME,
    COPIED_FILES,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    local_weight_files,
    read_json,
    weight_files,
)
from ligermodels.converters.save_dir import recover_dir
from ligermodels.errors import CheckpointError, did_you_mean, first_line, printable

logger = logging.getLogger(__name__)
# Short names of models. A folder of such a name in the working directory comes first.
ALIASES = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
_TEMPLATE = re.compile(rf"{CHAT_TEMPLATE_DIR}/[\w-][\w.-]*")
# run/checkpoints/step-00000500, run/checkpoint-500
_STEP = re.compile(r"(?:step|checkpoint)-(\d{1,18})")
# What huggingface_hub.utils.validate_repo_id accepts.
_REPO_ID = re.compile(r"(?!.*(--|\.\.|[-.]/|[-.]$|\.git$))\w[\w.-]{,95}(/\w[\w.-]{,95})?")
# What callers of `resolve` take beside the options, for suggestions.
_ARGUMENTS = ("dtype", "device", "revision", "allow_nonfinite")


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

    HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and a login work as in huggingface_hub. If the hub cannot
    be reached, this returns the cached snapshot, if it has all weights.

    Args:
        name_or_path: a folder, an id such as "meta-llama/Llama-3.2-1B", or a name in `ALIASES`.
        revision: a branch, tag or commit of a hub id. The default is the main branch.
        weights: if False, download only the config and tokenizer files.
        options: see `HubOptions`.
    Raises:
        TypeError: there is no such option.
        CheckpointError: the folder or repository does not exist, is gated or has no weights that
            can be read; or the hub cannot be reached and the cache has no complete copy. The
            message says what to do.
    """
    for word in options.keys() - HubOptions.__annotations__.keys():
        hint = did_you_mean(word, [*_ARGUMENTS, *HubOptions.__annotations__])
        raise TypeError(f"unexpected keyword argument {word!r}{hint}")
    name = os.fspath(name_or_path)
    if not name:
        raise CheckpointError("the model's name is empty; pass a folder or a hub id")
    folder = Path(os.path.expanduser(name))
    if checkpoint_step(folder) is not None and not os.path.lexists(folder / CONFIG_NAME):
        raise CheckpointError(
            f"{name}: this is a checkpoint of a run, not a model; write it as a model with "
            "'ligermodels convert', or pass the folder model/ of the run when the run is done"
        )
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
            f"{_near(folder)}"
        )
    repo = ALIASES.get(name, name)
    try:
        return _fetch(repo, revision, weights, **options)
    except CheckpointError as error:
        if near := _near(folder):
            raise CheckpointError(f"{name}: no such folder{near} As a hub id, {error}") from error
        if repo == name:
            raise
        raise CheckpointError(
            f"{name} is an alias, and a folder {name} in the working directory takes its place "
            f"(python examples/{name}.py {name} makes it without the hub); {error}"
        ) from error


def checkpoint_step(path: str | os.PathLike[str]) -> tuple[Path, int] | None:
    """Return the folder of a run and a step, if the path names a checkpoint of a run.

    It is that of the folder in RUN/checkpoints, or RUN/checkpoint-STEP.
    """
    path = Path(path)
    match = _STEP.fullmatch(path.name)
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    if match is None or not os.path.isfile(run / "run.json"):
        return None
    return run, int(match[1])


def _near(folder: Path) -> str:
    """Return "; did you mean 'x'?" with a checkpoint of almost this path, or ""."""
    beside = folder.parent.glob(f"*/{CONFIG_NAME}") if folder.parent.is_dir() else ()
    for name in difflib.get_close_matches(folder.name, [x.parent.name for x in beside], 1, 0.8):
        return f"; did you mean {os.fspath(folder.with_name(name))!r}?"
    return ""


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
    from huggingface_hub import errors

    if local_files_only:
        return _cached(repo, revision, weights, cache_dir, None)
    try:
        info = huggingface_hub.HfApi(token=token).model_info(repo, revision=revision)
        names = [sibling.rfilename for sibling in info.siblings or ()]
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
        return _cached(repo, revision, weights, cache_dir, fault)
    if CONFIG_NAME not in names and weights:
        raise CheckpointError(f"{repo}/{CONFIG_NAME}: the file is missing on the hub")
    options: Any = {"revision": revision, "cache_dir": cache_dir, "token": token}

    def read_index() -> dict[str, Any]:
        index = huggingface_hub.hf_hub_download(repo, SAFE_WEIGHTS_INDEX_NAME, **options)
        return read_json(Path(index), CheckpointError)

    try:
        found = _beside_weights(names, weights)
        if weights:
            files, shard_of = weight_files(repo, names, read_index)
            found += [*files, *([SAFE_WEIGHTS_INDEX_NAME] if shard_of else ())]
        folder = Path(huggingface_hub.snapshot_download(repo, allow_patterns=found, **options))
        # Without a connection, snapshot_download returns what is cached, also when files lack.
        if missing := [name for name in found if not (folder / name).exists()]:
            raise ConnectionError(f"{', '.join(missing)} did not arrive")
        return folder
    except CheckpointError:
        raise
    except errors.GatedRepoError as fault:
        raise _gated(repo) from fault
    except Exception as fault:  # Examples: a full disk, a lost connection, a server error.
        raise CheckpointError(
            f"{repo}: the model could not be downloaded: {first_line(fault)}; try again: what "
            "was downloaded is kept"
        ) from fault


def _beside_weights(names: Iterable[str], weights: bool) -> list[str]:
    """Return those of a repository's files that are needed beside the weights."""
    wanted = {CONFIG_NAME, *COPIED_FILES, *(ADDED_WEIGHTS if weights else ())}
    return [name for name in names if name in wanted or _TEMPLATE.fullmatch(name)]


def _gated(repo: str) -> CheckpointError:
    return CheckpointError(
        f"{repo}: the model is gated; accept its licence at https://huggingface.co/{repo} and log "
        "in with `hf auth login` (or set HF_TOKEN, or pass token)"
    )


def _cached(
    repo: str,
    revision: str | None,
    weights: bool,
    cache_dir: str | os.PathLike[str] | None,
    fault: Exception | None,
) -> Path:
    """Return the snapshot that an earlier run left in the cache, if it is complete.

    Args: fault: why the hub did not answer; None if it was not asked.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    # An older huggingface_hub has neither the error nor the function that raises it.
    no_list = getattr(errors, "CachedRepoTreeNotFoundError", AttributeError)
    reason = "local_files_only is set"
    if fault is not None:
        reason = f"the hub gives no answer that can be used ({first_line(fault)})"
    cache = Path(cache_dir or constants.HF_HUB_CACHE)
    found = huggingface_hub.try_to_load_from_cache(repo, CONFIG_NAME, cache, revision)
    if not isinstance(found, str):
        raise CheckpointError(
            f"{repo}: there is no such local folder, {reason}, and nothing is cached; download "
            "the model first, or pass the path of a local folder"
        ) from fault
    folder = Path(found).parent
    try:
        if weights:
            local_weight_files(folder)
        tree = huggingface_hub.get_cached_repo_tree(repo, revision=revision, cache_dir=cache)
        names = _beside_weights([file.path for file in tree], weights)
        if missing := [name for name in names if not (folder / name).exists()]:
            raise CheckpointError(
                f"{folder}: {', '.join(missing)} did not arrive; to go without, pass this folder"
            )
    except CheckpointError as incomplete:
        raise CheckpointError(
            f"{repo}: {reason}, and the cached copy is incomplete; download the rest first\n"
            f"  {incomplete}"
        ) from fault
    except no_list:  # another program may have taken files one by one
        for name in (GENERATION_CONFIG_NAME, "tokenizer.json") if weights else ():
            if huggingface_hub.try_to_load_from_cache(repo, name, cache, revision) is None:
                logger.warning("%s: the cached copy has no %s; the hub may have it", repo, name)
    if fault is not None and not constants.HF_HUB_OFFLINE:
        logger.warning("%s: %s; ligermodels is using the cached copy", repo, reason)
    return folder
