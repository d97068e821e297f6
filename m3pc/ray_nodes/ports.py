"""Table of all ports on which a Ray node listens, used by the command line, tests and docs.

If the node's address is 127.0.0.1, Ray binds all ports to loopback. With any other address it binds
most of them to all interfaces, whatever its options say: protect them by a firewall. All ports but
the three for metrics require the token; the agent's health check needs none.
"""

import errno
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from m3pc.types import InputError

LOCALHOST = "127.0.0.1"
BLOCK = 1000  # number of ports that a node takes with --ports-from
LAST = 65535
# Ray's client proxy starts one server per client, in this range; Ray's code fixes the range.
CLIENTS = range(23000, 24000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One row of the table."""

    name: str
    number: int  # the default
    option: str  # option of `ray start`; an environment variable if in capitals
    interfaces: Literal["all", "own", "loopback"]  # bound to, unless the node is on loopback
    serves: str
    head: bool = False  # whether only the head has it


# fmt: off
PORTS = (
    Port(name="gcs", number=6379, option="--port", interfaces="all", head=True,
         serves="control of the cluster; drivers and nodes join here"),
    Port(name="node-manager", number=6380, option="--node-manager-port", interfaces="all",
         serves="the raylet: leases of worker processes"),
    Port(name="object-manager", number=6381, option="--object-manager-port", interfaces="all",
         serves="objects that other nodes fetch"),
    Port(name="runtime-env-agent", number=6382, option="--runtime-env-agent-port", interfaces="own",
         serves="environments of jobs, for the raylet"),
    Port(name="agent-grpc", number=6383, option="--dashboard-agent-grpc-port", interfaces="all",
         serves="the node's agent, for the raylet and the dashboard"),
    Port(name="agent-http", number=6384, option="--dashboard-agent-listen-port", interfaces="own",
         serves="the node's agent: jobs; its health without a token"),
    Port(name="autoscaler-metrics", number=6385, option="AUTOSCALER_METRIC_PORT", interfaces="all",
         head=True, serves="metrics, without a token"),
    Port(name="dashboard-metrics", number=6386, option="DASHBOARD_METRIC_PORT", interfaces="all",
         head=True, serves="metrics, without a token"),
    Port(name="metrics", number=8080, option="--metrics-export-port", interfaces="all",
         serves="Ray's metrics for Prometheus, without a token"),
    Port(name="dashboard", number=8265, option="--dashboard-port", interfaces="loopback", head=True,
         serves="job submission, state, the web page"),
    Port(name="client", number=10001, option="--ray-client-server-port", interfaces="own",
         head=True, serves="drivers from afar, by ray://"),
)
# fmt: on
WORKERS = range(10002, 11000)  # one for each process that Ray starts, and for each driver
WHERE = {"all": "all interfaces*", "own": "the node's address*", "loopback": LOCALHOST}
NOTE = f"\\* {LOCALHOST} alone where that is the node's address, as it is unless --ip is given."


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePorts:
    """The ports of one node."""

    by_name: Mapping[str, int]
    workers: range

    def arguments(self, *, head: bool) -> list[str]:
        """Options of `ray start`."""
        options = [p for p in PORTS if p.option.startswith("--") and (head or not p.head)]
        fixed = [f"{port.option}={self.by_name[port.name]}" for port in options]
        low, high = self.workers[0], self.workers[-1]
        return [*fixed, f"--min-worker-port={low}", f"--max-worker-port={high}"]

    def environment(self) -> dict[str, str]:
        return {p.option: str(self.by_name[p.name]) for p in PORTS if not p.option.startswith("--")}

    def require_free(self, ip: str, *, head: bool) -> None:
        """Fail if a port is taken; Ray itself would start without that service and only log it."""
        for port in PORTS:
            if port.head and not head:
                continue
            host = LOCALHOST if port.interfaces == "loopback" or ip == LOCALHOST else ""
            _require_free(host, self.by_name[port.name], port.name)


def node_ports(start: int | None = None, **overrides: int | None) -> NodePorts:
    """The default ports, or consecutive ones from `start`; `overrides` (by name) win."""
    if start is not None and not 1024 <= start <= LAST - BLOCK + 1:
        raise InputError(
            f"--ports-from is {start}; a node takes {BLOCK} ports, so give a number from 1024 to "
            f"{LAST - BLOCK + 1}"
        )
    defaults = {p.name: p.number if start is None else start + n for n, p in enumerate(PORTS)}
    ports = defaults | {name: number for name, number in overrides.items() if number is not None}
    workers = WORKERS if start is None else range(start + len(PORTS), start + BLOCK)
    for name, number in ports.items():
        others = {other for key, other in ports.items() if key != name}
        if number in others or number in workers:
            raise InputError(
                f"port {number} ({name}) is used twice on this node, or is one of its workers' "
                f"({workers[0]} to {workers[-1]}); choose another, or count all by --ports-from"
            )
    return NodePorts(by_name=ports, workers=workers)


def ports_table(start: int | None = None) -> str:
    """The table in Markdown."""
    ports = node_ports(start)
    rows = [("port", "name", "node", "bound to", "gives"), ("---",) * 5]
    for port in PORTS:
        node = "head" if port.head else "each"
        rows.append(
            (str(ports.by_name[port.name]), port.name, node, WHERE[port.interfaces], port.serves)
        )
    workers, clients = ports.workers, CLIENTS
    span = f"{workers[0]} to {workers[-1]}"
    rows.append((span, "workers", "each", WHERE["all"], "calls to processes and drivers"))
    span = f"{clients[0]} to {clients[-1]}"
    rows.append((span, "clients", "head", WHERE["loopback"], "one server for each ray:// client"))
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", NOTE])


def _require_free(host: str, number: int, name: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
            probe.listen(1)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise InputError(
                f"port {number} ({name}) is taken by another process; end that, or count all ports "
                f"of this node from elsewhere, as in --ports-from {BLOCK * 21}"
            ) from None
