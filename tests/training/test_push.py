"""The export is sent to a hub at the end of a run."""

from __future__ import annotations

from unittest.mock import create_autospec

import huggingface_hub
import pytest
from huggingface_hub import RepoUrl

from ligermodels.errors import ConfigError, SaveError
from ligermodels.training.reports import push
from tests.training.tiny_run import run


@pytest.fixture
def hub(monkeypatch):
    """A hub with the methods of the library, which takes everything."""
    api = create_autospec(huggingface_hub.HfApi, instance=True)
    api.create_repo.return_value = RepoUrl("https://hub/me/tiny", endpoint="https://hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    return api


def test_a_run_is_pushed_at_its_end(hub, checkpoint, text, tmp_path):
    given = {"max_steps": 1, "push_to_hub": "me/tiny", "hub_private_repo": True}
    done = run(checkpoint, text, tmp_path / "run", **given)
    hub.create_repo.assert_called_once_with("me/tiny", private=True, exist_ok=True)
    sent = hub.upload_folder.call_args.kwargs
    assert (sent["repo_id"], sent["folder_path"]) == ("me/tiny", done.model_dir)
    assert "pushed to https://hub/me/tiny" in done.notes


def test_nobody_logged_in_is_found_before_the_run(hub, checkpoint, text, tmp_path):
    hub.whoami.side_effect = OSError("401 Unauthorized")
    with pytest.raises(ConfigError, match="the hub does not say who is logged in: 401"):
        run(checkpoint, text, tmp_path / "run", push_to_hub="me/tiny")
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_pushed_stays(hub, tmp_path):
    hub.upload_folder.side_effect = OSError("403 Forbidden")
    with pytest.raises(SaveError, match=rf"me/tiny: 403 .*; the model is in {tmp_path}"):
        push(tmp_path, "me/tiny", private=False)
