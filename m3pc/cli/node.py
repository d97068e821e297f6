"""`m3pc node`: run this machine as a node of a Ray cluster, as long as the command runs."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from m3pc.ray_nodes.gcs_storage import GcsStore
    from m3pc.ray_nodes.node import Node

app = typer.Typer(help="Run this machine as a node of a Ray cluster.", no_args_is_help=True)

Cpus = Annotated[
    int | None, typer.Option(min=0, help="CPUs that the cluster may use here. Default: all.")
]
Gpus = Annotated[
    int | None, typer.Option(min=0, help="GPUs that the cluster may use here. Default: all.")
]
Roles = Annotated[
    list[str] | None,
    typer.Option(
        "--role",
        metavar="ROLE",
        help="Processes that this node is for: actor, planner or learner; used by runs with "
        "fleet.roles. May be repeated.",
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        help="Folder for token, sockets and logs: a short path that only you can read. Default: "
        "one in XDG_RUNTIME_DIR or /tmp."
    ),
]
ObjectStore = Annotated[
    int | None,
    typer.Option(
        "--object-store-memory", min=80 << 20, help="Bytes of Ray's object store. Default: 256 MiB."
    ),
]
PortsFrom = Annotated[
    int | None,
    typer.Option(
        "--ports-from",
        help="Use the ports from this number on, so that several nodes fit on one machine.",
    ),
]
Metrics = Annotated[
    int | None,
    typer.Option(
        "--metrics-port", help="Port of Ray's metrics, readable without a token. Default: 8080."
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure-without-token",
        help="Use no token: everyone who can reach the node can run commands on it.",
    ),
]


@app.command()
def head(
    context: typer.Context,
    ip: Annotated[
        str, typer.Option(help="Address of this machine at which other nodes reach it.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="Port at which nodes join. Default: 6379.")
    ] = None,
    dashboard_port: Annotated[
        int | None,
        typer.Option(help="Port of the dashboard, on 127.0.0.1 only. Default: 8265."),
    ] = None,
    metrics_port: Metrics = None,
    ports_from: PortsFrom = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    role: Roles = None,
    object_store: ObjectStore = None,
    folder: Folder = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File of the cluster's token, made if it does not exist. Default: FOLDER/token."
        ),
    ] = None,
    redis: Annotated[
        str,
        typer.Option(
            envvar="M3PC_RAY_REDIS",
            help="redis://HOST:PORT (give a password only in the environment variable): keep the "
            "cluster's state there, so that it survives a crash of its control process.",
        ),
    ] = "",
    insecure: Insecure = False,
) -> None:
    """Start a cluster with this machine as its head, on loopback unless --ip is given."""
    from m3pc.core.token_file import make_token
    from m3pc.ray_nodes.connection import OBJECT_STORE
    from m3pc.ray_nodes.node import Node, check_ip, require_authentication
    from m3pc.ray_nodes.ports import node_ports

    _begin()
    require_authentication(os.environ, insecure=insecure)
    ports = node_ports(ports_from, gcs=port, dashboard=dashboard_port, metrics=metrics_port)
    own, store, roles = check_ip(ip, os.environ), _gcs_store(redis, context), _check_roles(role)
    node_folder = _make_folder(folder, ports.by_name["gcs"])
    _run(
        Node(
            head_address=None,
            ip=own,
            ports=ports,
            folder=node_folder,
            token=None
            if insecure
            else make_token((token_file or node_folder / "token").absolute()),
            roles=roles,
            cpus=cpus,
            gpus=gpus,
            object_store=object_store or OBJECT_STORE,
            store=store,
        )
    )


@app.command()
def worker(
    address: Annotated[str, typer.Option(help="HOST:PORT of the head.")],
    ip: Annotated[
        str | None,
        typer.Option(
            help="Address of this machine at which other nodes reach it. Default: that of the "
            "connection to the head."
        ),
    ] = None,
    metrics_port: Metrics = None,
    ports_from: PortsFrom = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    role: Roles = None,
    object_store: ObjectStore = None,
    folder: Folder = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="RAY_AUTH_TOKEN_PATH",
            help="A copy of the head's token file, readable only by you (mode 0600).",
        ),
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Join a cluster, and join it again whenever the connection was lost."""
    from m3pc.core.token_file import check_token
    from m3pc.ray_nodes.connection import OBJECT_STORE
    from m3pc.ray_nodes.node import Node, check_ip, own_address, require_authentication
    from m3pc.ray_nodes.ports import node_ports
    from m3pc.types import InputError

    _begin()
    require_authentication(os.environ, insecure=insecure)
    if token_file is None and not insecure:
        raise InputError(
            "no token file is given; copy the head's to this machine (mode 0600) and name it by "
            "--token-file or RAY_AUTH_TOKEN_PATH"
        )
    token = check_token(token_file.absolute()) if token_file and not insecure else None
    own = check_ip(ip or own_address(address), os.environ)
    roles = _check_roles(role)
    ports = node_ports(ports_from, metrics=metrics_port)
    _run(
        Node(
            head_address=address,
            ip=own,
            ports=ports,
            folder=_make_folder(folder, ports.by_name["node-manager"]),
            token=token,
            roles=roles,
            cpus=cpus,
            gpus=gpus,
            object_store=object_store or OBJECT_STORE,
        )
    )


@app.command("ports")
def show_ports(ports_from: PortsFrom = None) -> None:
    """Print every port at which a node listens, as a Markdown table."""
    from m3pc.ray_nodes.ports import ports_table

    typer.echo(ports_table(ports_from))


def _begin() -> None:
    """Make new files readable by their owner only; log to stderr."""
    import logging

    os.umask(0o077)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s level=%(levelname)s %(message)s", force=True
    )


def _make_folder(folder: Path | None, port: int) -> Path:
    from m3pc.core.token_file import private_folder
    from m3pc.ray_nodes.node import default_folder, require_short_path

    return private_folder(require_short_path((folder or default_folder(port)).absolute()))


def _check_roles(roles: list[str] | None) -> tuple[str, ...]:
    from m3pc.ray_nodes.node import ROLES
    from m3pc.types import InputError

    for role in roles or ():
        if role not in ROLES:
            raise InputError(f"--role is {role!r}; give one of {', '.join(ROLES)}")
    return tuple(dict.fromkeys(roles or ()))


def _gcs_store(redis: str, context: typer.Context) -> "GcsStore | None":
    from m3pc.ray_nodes.gcs_storage import VARIABLE, parse_gcs_store
    from m3pc.types import InputError

    if not redis:
        return None
    store = parse_gcs_store(redis)
    source = context.get_parameter_source("redis")
    if store.password and (source is None or source.name != "ENVIRONMENT"):
        raise InputError(
            "--redis holds a password, which everyone on this machine can read in the list of "
            f"processes; change it, and give the address in the variable {VARIABLE} instead"
        )
    return store


def _run(node: "Node") -> None:
    from m3pc.ray_nodes.node_watch import run_node

    raise typer.Exit(run_node(node, lambda: _show(node)))


def _show(node: "Node") -> None:
    """Print the commands that use the cluster from another shell or machine."""
    login = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={node.token} " if node.token else ""
    token_option = f"--token-file {node.token}" if node.token else "--insecure-without-token"
    if not node.is_head:
        typer.echo(f"joined: {node.address} as {node.ip}")
        return
    typer.echo(
        f"address:   {node.address}\n"
        f"dashboard: {node.dashboard}\n"
        f"token:     {node.token or 'none: everyone who reaches it can run commands'}\n"
        f"use it:    {login}m3pc resume RUN --address {node.address}\n"
        f"submit:    {login}m3pc submit --address {node.dashboard} -- finetune ...\n"
        f"join it:   m3pc node worker --address {node.address} {token_option}"
        f"{' --ports-from 21000' if node.ip == '127.0.0.1' else ''}"
    )
