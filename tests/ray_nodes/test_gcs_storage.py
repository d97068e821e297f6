"""Redis as the storage of Ray's control process, and the secrecy of its password."""

from pathlib import Path

import pytest

from m3pc.ray_nodes.gcs_storage import GcsStore, parse_gcs_store, record_namespace
from m3pc.types import InputError
from tests.support.servers.ray_nodes import refused_node
from tests.support.servers.redis_server import ADMIN, ADMIN_PASSWORD, RedisServer, free_port


def store_in(server: RedisServer) -> GcsStore:
    return parse_gcs_store(f"redis://{ADMIN}:{ADMIN_PASSWORD}@127.0.0.1:{server.port}")


def test_an_address_is_read_and_its_password_is_never_shown() -> None:
    store = parse_gcs_store("rediss://us%40er:pass%2Fword@10.0.0.1:6390/0")
    assert (store.host, store.port, store.user, store.password, store.encrypted) == (
        *("10.0.0.1", 6390, "us@er", "pass/word"),
        True,
    )
    assert "pass" not in repr(store)
    assert store.environment()["RAY_REDIS_ADDRESS"] == "rediss://10.0.0.1:6390"
    assert parse_gcs_store("redis://h:1").namespace != parse_gcs_store("redis://h:1").namespace
    assert "RAY_REDIS_PASSWORD" not in parse_gcs_store("redis://h:1").environment()


@pytest.mark.parametrize(
    "url", ["redis://", "h:1", "redis://h", "http://u:secret@h:1", "redis://h:x", "redis://h:1/3"]
)
def test_an_address_that_cannot_be_used_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(InputError, match="give redis://") as error:
        parse_gcs_store(url)
    assert "secret" not in str(error.value)


def test_a_redis_that_does_not_answer_is_refused_at_once(redis_server: RedisServer) -> None:
    store_in(redis_server).check()
    for url in (f"redis://127.0.0.1:{free_port()}", f"redis://127.0.0.1:{redis_server.port}"):
        with pytest.raises(InputError, match="no Redis for Ray"):
            parse_gcs_store(url).check()


def test_the_data_of_a_cluster_in_redis_are_removed_at_its_end(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    with redis_server.admin() as client:
        killed, ended = store_in(redis_server), store_in(redis_server)
        record_namespace(killed, tmp_path)
        for store in (killed, ended):
            client.hset(f"RAY{store.namespace}@NODE", "x", "y")
        client.set("m3pc:stays", 1)
        record_namespace(ended, tmp_path)
        assert client.keys("RAY*") == [f"RAY{ended.namespace}@NODE".encode()]
        ended.clear()
        assert client.keys("RAY*") == []
        assert client.delete("m3pc:stays") == 1
    parse_gcs_store(f"redis://127.0.0.1:{free_port()}").clear()  # an absent Redis is no error


def test_a_password_on_the_command_line_is_refused() -> None:
    words = "everyone on this machine can read"
    error = refused_node(words, "head", "--redis", "redis://u:secret@127.0.0.1:1")
    assert "secret" not in error
