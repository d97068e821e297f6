"""Where Ray's control process keeps what it knows, and that nobody sees the password."""

from pathlib import Path

import pytest

from m3pc.ray_nodes.gcs_storage import GcsStore, gcs_store, remember
from m3pc.types import InputError
from tests.support.servers.ray_nodes import refused_node
from tests.support.servers.redis_server import ADMIN, ADMIN_PASSWORD, RedisServer, free_port


def store_in(server: RedisServer) -> GcsStore:
    return gcs_store(f"redis://{ADMIN}:{ADMIN_PASSWORD}@127.0.0.1:{server.port}")


def test_an_address_is_read_and_its_password_is_never_shown() -> None:
    found = gcs_store("rediss://us%40er:pass%2Fword@10.0.0.1:6390/0")
    assert (found.host, found.port, found.user, found.password, found.encrypted) == (
        *("10.0.0.1", 6390, "us@er", "pass/word"),
        True,
    )
    assert "pass" not in repr(found)
    assert found.environment()["RAY_REDIS_ADDRESS"] == "rediss://10.0.0.1:6390"
    assert gcs_store("redis://h:1").namespace != gcs_store("redis://h:1").namespace
    assert "RAY_REDIS_PASSWORD" not in gcs_store("redis://h:1").environment()


@pytest.mark.parametrize(
    "url", ["redis://", "h:1", "redis://h", "http://u:secret@h:1", "redis://h:x", "redis://h:1/3"]
)
def test_an_address_that_cannot_be_used_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(InputError, match="give redis://") as error:
        gcs_store(url)
    assert "secret" not in str(error.value)


def test_a_redis_that_does_not_answer_is_told_at_once(redis_server: RedisServer) -> None:
    store_in(redis_server).check()
    for url in (f"redis://127.0.0.1:{free_port()}", f"redis://127.0.0.1:{redis_server.port}"):
        with pytest.raises(InputError, match="no Redis for Ray"):
            gcs_store(url).check()


def test_what_a_cluster_left_in_redis_goes_with_it(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    with redis_server.admin() as client:
        killed, ended = store_in(redis_server), store_in(redis_server)
        remember(killed, tmp_path)
        for store in (killed, ended):
            client.hset(f"RAY{store.namespace}@NODE", "x", "y")
        client.set("m3pc:stays", 1)
        remember(ended, tmp_path)
        assert client.keys("RAY*") == [f"RAY{ended.namespace}@NODE".encode()]
        ended.forget()
        assert client.keys("RAY*") == []
        assert client.delete("m3pc:stays") == 1
    gcs_store(f"redis://127.0.0.1:{free_port()}").forget()  # one that is gone has nothing


def test_a_password_on_the_command_line_is_refused() -> None:
    words = "everybody on this machine can read"
    said = refused_node(words, "head", "--redis", "redis://u:secret@127.0.0.1:1")
    assert "secret" not in said
