"""The settings of a Ray node on this machine, and the command and environment they result in."""

import ipaddress
import json
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from m3pc.core.subprocesses import python_path
from m3pc.core.token_file import MODE, PATH, TOKEN, require_token_mode
from m3pc.ray_nodes.connection import LOOPBACK_ONLY, OBJECT_STORE, SETTINGS
from m3pc.ray_nodes.gcs_storage import PASSWORD, VARIABLE, GcsStore
from m3pc.ray_nodes.ports import LOCALHOST, NodePorts
from m3pc.types import InputError

ROLES = ("actor", "planner", "learner")
# Units of a role resource that a node offers. A process takes 0.001 units: the resource only
# determines where processes may run.
ROLE_CAPACITY = 1000
FOLDER_VARIABLE = "M3PC_NODE"  # names the node's folder in the environment of its processes
RAY_FOLDER = "r"  # in the node's folder; short, because Ray's socket paths contain it
# Ray's sockets lie under .../r/session_DATE_TIME_PID/sockets/ and their paths may have 107 bytes.
MAX_FOLDER_BYTES = 38
INSECURE = "--insecure-without-token"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A head, or a worker that joins one."""

    head_address: str | None  # None for a head
    ip: str
    ports: NodePorts
    folder: Path
    token: Path | None  # token file; None: no authentication
    roles: Sequence[str] = ()
    cpus: int | None = None  # None: Ray detects them; the same for `gpus`
    gpus: int | None = None
    object_store: int = OBJECT_STORE  # bytes
    store: GcsStore | None = None  # a head's GCS keeps its tables here; None: in memory

    @property
    def is_head(self) -> bool:
        return self.head_address is None

    @property
    def address(self) -> str:
        """The address of the cluster."""
        return self.head_address or f"{self.ip}:{self.ports.by_name['gcs']}"

    @property
    def dashboard(self) -> str:
        return f"http://{LOCALHOST}:{self.ports.by_name['dashboard']}"

    def command(self) -> list[str]:
        counts = {"--num-cpus": self.cpus, "--num-gpus": self.gpus}
        offered = {f"m3pc_{role}": ROLE_CAPACITY for role in self.roles}
        return [
            *(sys.executable, "-P", "-m", "m3pc.ray_nodes.ray_start"),
            *(["--head", f"--dashboard-host={LOCALHOST}"] if self.is_head else []),
            *([] if self.is_head else [f"--address={self.head_address}"]),
            *(f"--node-ip-address={self.ip}", f"--temp-dir={self.folder / RAY_FOLDER}"),
            *self.ports.arguments(head=self.is_head),
            *(f"{option}={count}" for option, count in counts.items() if count is not None),
            *(f"--object-store-memory={self.object_store}", f"--resources={json.dumps(offered)}"),
            *("--disable-usage-stats", "--log-color=false"),
            *(self.store.arguments() if self.store else ()),
        ]

    def environment(self, outside: Mapping[str, str] | None = None) -> dict[str, str]:
        """The caller's environment, with this node's settings of authentication and Redis. Jobs
        get the `python` that runs this process."""
        variables = {**SETTINGS, **(os.environ if outside is None else outside)}
        for name in (MODE, TOKEN, PATH, PASSWORD, VARIABLE, "RAY_REDIS_ADDRESS", "RAY_ADDRESS"):
            variables.pop(name, None)
        path = os.pathsep.join(
            [str(Path(sys.executable).parent), variables.get("PATH", os.defpath)]
        )
        variables |= {"PATH": path, "PYTHONPATH": python_path(variables)}
        entry = {MODE: "token", PATH: str(self.token)} if self.token else {MODE: "disabled"}
        variables |= {**entry, **self.ports.environment(), FOLDER_VARIABLE: str(self.folder)}
        if self.ip == LOCALHOST:
            variables |= LOOPBACK_ONLY
        return variables | (self.store.environment() if self.store else {})


def require_authentication(environment: Mapping[str, str], *, insecure: bool) -> None:
    """Refuse a node without token authentication unless `insecure` is set."""
    if insecure:
        log.warning(
            'event=without-token detail="anyone who can reach this node can run code on it"'
        )
        return
    require_token_mode(environment, f"unset it, or say {INSECURE}")
    if TOKEN in environment:
        raise InputError(
            f"{TOKEN} is set: every process of the node would show the token in its environment; "
            f"write it into a file of mode 0600, unset it and name the file by --token-file or "
            f"{PATH}"
        )


def check_ip(host: str, environment: Mapping[str, str]) -> str:
    """Resolve a host to an address of this machine. Log a warning if the address is public and the
    traffic is not encrypted, or if Ray would listen on all interfaces for it."""
    try:
        address = ipaddress.ip_address(socket.gethostbyname(host))
    except OSError as error:
        raise InputError(
            f"--ip is {host!r}, which is no address: {error}; give one of this machine, or leave "
            f"it out for {LOCALHOST}"
        ) from None
    with socket.socket() as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            raise InputError(
                f"--ip is {host!r}, which is not an address of this machine; `hostname -I` "
                "shows those"
            ) from None
    encrypted = environment.get("RAY_USE_TLS", "0").lower() in {"1", "true"}
    if address.is_loopback and str(address) != LOCALHOST:
        log.warning("event=listens-everywhere ip=%s loopback-address=%s", address, LOCALHOST)
    elif not (address.is_private or encrypted):
        log.warning(
            "event=public-address-without-tls ip=%s token=sent-unencrypted "
            "remedy=private-network-or-RAY_USE_TLS=1",
            address,
        )
    return str(address)


def own_address(head: str) -> str:
    """The address by which this machine reaches the head. No packet is sent."""
    host, _, port = head.rpartition(":")
    if not (host and port.isdecimal()):
        raise InputError(f"--address is {head!r}; give HOST:PORT, as the head printed it")
    try:
        with socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InputError(f"no way leads to the head at {head}: {error}; give --ip") from None


def default_folder(port: int) -> Path:
    """A folder per port, which does not survive a reboot."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    name = f"m3pc-{os.getuid()}-{port}"
    path = Path(runtime) / name
    is_usable = runtime and len(os.fsencode(path)) <= MAX_FOLDER_BYTES and Path(runtime).is_dir()
    return path if is_usable else Path("/tmp") / name


def require_short_path(folder: Path) -> Path:
    size = len(os.fsencode(folder))
    if size > MAX_FOLDER_BYTES:
        raise InputError(
            f"{folder} has {size} bytes, and Ray's sockets in it would have names that are too "
            f"long for Linux; give a --folder of at most {MAX_FOLDER_BYTES}"
        )
    return folder
