"""Who may come into a cluster: tokens, the files and folders that hold them, what is refused."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from m3pc.core.token_file import check_token, make_token, private_folder
from m3pc.ray_nodes.connection import prepare_environment
from m3pc.ray_nodes.node import INSECURE
from m3pc.types import InputError
from tests.support.servers.ray_nodes import refused_node


def test_a_token_has_256_bits_and_one_reader(tmp_path: Path) -> None:
    path = make_token(tmp_path / "token")
    assert len(bytes.fromhex(path.read_text())) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_text()
    assert make_token(path).read_text() == before  # other nodes hold copies of it
    assert make_token(tmp_path / "other").read_text() != before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o610])
def test_a_token_that_others_may_touch_is_refused(mode: int, tmp_path: Path) -> None:
    path = make_token(tmp_path / "token")
    path.chmod(mode)
    for use in (make_token, check_token):
        with pytest.raises(InputError, match=rf"mode {mode:04o}.*chmod 600"):
            use(path)


def test_a_token_that_is_empty_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        check_token(tmp_path / "token")
    (tmp_path / "token").touch(0o600)
    with pytest.raises(InputError, match="is empty"):
        check_token(tmp_path / "token")


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "node")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder(folder) == folder
    (tmp_path / "link").symlink_to(folder)
    folder.chmod(0o711)
    for path in (folder, tmp_path / "link"):
        with pytest.raises(InputError, match="only you may enter"):
            private_folder(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of somebody else")
def test_a_folder_that_somebody_else_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir(0o700)
    os.chown(tmp_path / "node", 65534, 65534)
    with pytest.raises(InputError, match="owner 65534"):
        private_folder(tmp_path / "node")


def test_a_private_cluster_is_not_started_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(InputError, match=r"RAY_AUTH_MODE is 'disabled'.*unset it"):
        prepare_environment(None)


def test_a_node_that_joins_uses_the_named_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for mode, path, expected in (
        (None, None, None),
        (None, "/nowhere", "token"),
        ("disabled", "/nowhere", "disabled"),
    ):
        for name, value in (("RAY_AUTH_MODE", mode), ("RAY_AUTH_TOKEN_PATH", path)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        prepare_environment("127.0.0.1:6379")
        assert os.environ.get("RAY_AUTH_MODE") == expected


@pytest.mark.parametrize("words", [("head",), ("worker", "--address", "127.0.0.1:6379")])
def test_a_node_is_not_started_without_token_mode(words: tuple[str, ...]) -> None:
    refused_node("RAY_AUTH_MODE is 'disabled'", *words, RAY_AUTH_MODE="disabled")
    refused_node(INSECURE, *words, RAY_AUTH_MODE="disabled")
    refused_node("RAY_AUTH_TOKEN is set", *words, RAY_AUTH_TOKEN="ab" * 32)


def test_a_node_with_a_token_that_others_may_read_is_refused() -> None:
    with TemporaryDirectory(prefix="m3-", dir="/tmp") as folder:
        token = make_token(Path(folder) / "token")
        token.chmod(0o644)
        refused_node("mode 0644", "head", "--folder", folder)
        joining = ("worker", "--address", "127.0.0.1:9")
        refused_node("mode 0644", *joining, "--token-file", str(token))
        refused_node("mode 0644", *joining, RAY_AUTH_TOKEN_PATH=str(token))
        refused_node("no token file is given", *joining)
        Path(folder).chmod(0o755)
        refused_node("only you may enter", "head", "--folder", folder)
