"""A Ray node on this machine: what it is told to be, as a command and its environment."""

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
ROOM = 1000  # of a role's resource: processes take a thousandth each, to say where they may be
MARK = "M3PC_NODE"  # a variable of every process of a node, with its folder
RAY = "r"  # Ray's own folder in that of the node: short, because sockets lie in it
# Ray's sockets lie under .../r/session_DATE_TIME_PID/sockets/ and their paths may have 107 bytes.
LONGEST_FOLDER = 38
INSECURE = "--insecure-without-token"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    joins: str | None  # address of the head; None for a head
    ip: str
    ports: NodePorts
    folder: Path
    token: Path | None  # its file; None where everybody may come in
    roles: Sequence[str] = ()
    cpus: int | None = None  # as many as there are
    gpus: int | None = None
    object_store: int = OBJECT_STORE  # bytes
    store: GcsStore | None = None  # where the GCS of a head keeps what it knows

    @property
    def is_head(self) -> bool:
        return self.joins is None

    @property
    def address(self) -> str:
        """Of the cluster."""
        return self.joins or f"{self.ip}:{self.ports.of['gcs']}"

    @property
    def dashboard(self) -> str:
        return f"http://{LOCALHOST}:{self.ports.of['dashboard']}"

    def command(self) -> list[str]:
        counts = {"--num-cpus": self.cpus, "--num-gpus": self.gpus}
        offered = {f"m3pc_{role}": ROOM for role in self.roles}
        return [
            *(sys.executable, "-P", "-m", "m3pc.ray_nodes.ray_start"),
            *(["--head", f"--dashboard-host={LOCALHOST}"] if self.is_head else []),
            *([] if self.is_head else [f"--address={self.joins}"]),
            *(f"--node-ip-address={self.ip}", f"--temp-dir={self.folder / RAY}"),
            *self.ports.arguments(head=self.is_head),
            *(f"{option}={count}" for option, count in counts.items() if count is not None),
            *(f"--object-store-memory={self.object_store}", f"--resources={json.dumps(offered)}"),
            *("--disable-usage-stats", "--log-color=false"),
            *(self.store.arguments() if self.store else ()),
        ]

    def environment(self, outside: Mapping[str, str] | None = None) -> dict[str, str]:
        """What is set outside stays, but for all that says who may come in and where Redis is. A
        job's `python` is this one."""
        found = {**SETTINGS, **(os.environ if outside is None else outside)}
        for name in (MODE, TOKEN, PATH, PASSWORD, VARIABLE, "RAY_REDIS_ADDRESS", "RAY_ADDRESS"):
            found.pop(name, None)
        path = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", os.defpath)])
        found |= {"PATH": path, "PYTHONPATH": python_path(found)}
        entry = {MODE: "token", PATH: str(self.token)} if self.token else {MODE: "disabled"}
        found |= {**entry, **self.ports.environment(), MARK: str(self.folder)}
        if self.ip == LOCALHOST:
            found |= LOOPBACK_ONLY
        return found | (self.store.environment() if self.store else {})


def require_entry(environment: Mapping[str, str], *, insecure: bool) -> None:
    """That nobody comes in without a token, unless told in so many words."""
    if insecure:
        log.warning("event=without-token everybody-who-reaches-this-node=runs-commands-on-it")
        return
    require_token_mode(environment, f"unset it, or say {INSECURE}")
    if TOKEN in environment:
        raise InputError(
            f"{TOKEN} is set: every process of the node would show the token in its environment; "
            f"write it into a file of mode 0600, unset it and name the file by --token-file or "
            f"{PATH}"
        )


def check_ip(given: str, environment: Mapping[str, str]) -> str:
    """An address of this machine, from a name or a number, with a warning where it is a public
    one and what is said can be heard."""
    try:
        found = ipaddress.ip_address(socket.gethostbyname(given))
    except OSError as error:
        raise InputError(
            f"--ip is {given!r}, which is no address: {error}; give one of this machine, or leave "
            f"it out for {LOCALHOST}"
        ) from None
    with socket.socket() as probe:
        try:
            probe.bind((str(found), 0))
        except OSError:
            raise InputError(
                f"--ip is {given!r}, which is not an address of this machine; `hostname -I` "
                "shows those"
            ) from None
    encrypted = environment.get("RAY_USE_TLS", "0").lower() in {"1", "true"}
    if found.is_loopback and str(found) != LOCALHOST:
        log.warning("event=listens-everywhere ip=%s only-on-loopback=%s", found, LOCALHOST)
    elif not (found.is_private or encrypted):
        log.warning(
            "event=public-address-without-tls ip=%s token=readable-on-the-way "
            "remedy=private-network-or-RAY_USE_TLS=1",
            found,
        )
    return str(found)


def own_address(head: str) -> str:
    """Of this machine, as the head sees it. Nothing is sent."""
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
    """One for each node on this machine, gone after a reboot."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    name = f"m3pc-{os.getuid()}-{port}"
    found = Path(runtime) / name
    short = runtime and len(os.fsencode(found)) <= LONGEST_FOLDER and Path(runtime).is_dir()
    return found if short else Path("/tmp") / name


def check_length(folder: Path) -> Path:
    size = len(os.fsencode(folder))
    if size > LONGEST_FOLDER:
        raise InputError(
            f"{folder} has {size} bytes, and Ray's sockets in it would have names that are too "
            f"long for Linux; give a --folder of at most {LONGEST_FOLDER}"
        )
    return folder
