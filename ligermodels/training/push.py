"""Send the export of a run to the hub."""

from __future__ import annotations

from pathlib import Path

from ligermodels.errors import ConfigError, SaveError, first_line


def check_login() -> None:
    """Ask the hub who is logged in, so that a run does not find out at its end.

    Raises:
        ConfigError: nobody is, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:  # A missing connection raises many kinds of errors.
        raise ConfigError(
            f"push_to_hub: the hub does not say who is logged in: {first_line(error)}; log in with "
            "`hf auth login`, or set HF_TOKEN"
        ) from error


def push(folder: Path, repo: str, *, private: bool) -> str:
    """Create a repository if it is not there, put the files of a folder into it, return its URL.

    Raises:
        SaveError: the hub refuses something or cannot be reached. The folder is unchanged.
    """
    from huggingface_hub import HfApi

    try:
        url = HfApi().create_repo(repo, private=private, exist_ok=True)
        HfApi().upload_folder(
            repo_id=url.repo_id, folder_path=folder, commit_message="Upload the fine-tuned model"
        )
    except Exception as error:
        raise SaveError(
            f"push_to_hub: {repo}: {first_line(error)}; the model is in {folder}, and "
            f"'hf upload {repo} {folder}' sends it"
        ) from error
    return str(url)
