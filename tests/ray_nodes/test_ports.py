"""The ports of a node: one table that the command line, the tests and the documents share."""

import socket

import pytest

from m3pc.ray_nodes.ports import CLIENTS, PORTS, WORKERS, node_ports, ports_table
from m3pc.types import InputError
from tests.support.servers.redis_server import free_port


def test_no_port_is_used_twice() -> None:
    numbers = [port.number for port in PORTS]
    assert len({*numbers, *WORKERS, *CLIENTS}) == len(numbers) + len(WORKERS) + len(CLIENTS)


def test_consecutive_blocks_of_ports_do_not_overlap() -> None:
    first, second = node_ports(20000), node_ports(21000)
    assert sorted(first.by_name.values()) == list(range(20000, 20011))
    assert first.workers == range(20011, 21000)
    mine = {*first.by_name.values(), *first.workers}
    assert not mine & {*second.by_name.values(), *second.workers}
    assert mine == set(range(20000, 21000))


def test_every_port_is_pinned_on_the_command_line_or_by_a_variable() -> None:
    ports = node_ports(20000)
    words = [*ports.arguments(head=True), *map("=".join, ports.environment().items())]
    assert sorted(int(word.split("=")[1]) for word in words) == [*range(20000, 20012), 20999]
    others = {word.split("=")[0] for word in ports.arguments(head=False)}
    assert not others & {"--port", "--dashboard-port", "--ray-client-server-port"}


def test_an_explicit_port_wins() -> None:
    assert node_ports(None, gcs=7000, metrics=None).by_name["gcs"] == 7000
    assert node_ports(None).by_name["metrics"] == 8080


@pytest.mark.parametrize("port", [8265, WORKERS[0], WORKERS[-1]])
def test_a_port_of_another_part_of_the_node_is_refused(port: int) -> None:
    with pytest.raises(InputError, match=rf"port {port} \(.*--ports-from"):
        node_ports(None, gcs=port)


@pytest.mark.parametrize("first", [0, 1023, 64537])
def test_a_block_that_does_not_fit_is_refused(first: int) -> None:
    with pytest.raises(InputError, match="a node takes 1000 ports"):
        node_ports(first)


def test_a_port_that_is_taken_is_refused_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        number = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"port {number} \(gcs\) is taken"):
            node_ports(None, gcs=number).require_free("127.0.0.1", head=True)


def test_a_taken_port_of_the_head_does_not_matter_to_a_worker() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        names = ("node-manager", "object-manager", "runtime-env-agent", "agent-grpc", "agent-http")
        free = {name: free_port() for name in (*names, "metrics")}
        ports = node_ports(None, **free, gcs=taken.getsockname()[1])
        ports.require_free("127.0.0.1", head=False)


def test_the_markdown_table_has_every_port() -> None:
    table = ports_table(20000)
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(PORTS) + 2
    assert all(f"| {20000 + number} | {port.name} |" in table for number, port in enumerate(PORTS))
    assert "| 20011 to 20999 | workers |" in table
    assert "| 23000 to 23999 | clients | head | 127.0.0.1 |" in table
