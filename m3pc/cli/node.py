"""`m3pc node`: this machine as a node of a Ray cluster, for as long as the command runs."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from m3pc.ray_nodes.gcs_storage import GcsStore
    from m3pc.ray_nodes.node import Node

app = typer.Typer(help="Make this machine a node of a Ray cluster.", no_args_is_help=True)

Cpus = Annotated[int | None, typer.Option(min=0, help="Default: as many as there are.")]
Gpus = Annotated[int | None, typer.Option(min=0, help="Default: as many as there are.")]
Roles = Annotated[
    list[str] | None,
    typer.Option("--role", metavar="ROLE", help="actor, planner or learner. May be repeated."),
]
Folder = Annotated[
    Path | None,
    typer.Option(help="For token, sockets and logs: short, and only you may enter it."),
]
ObjectStore = Annotated[
    int | None, typer.Option("--object-store-memory", min=80 << 20, help="Bytes.")
]
PortsFrom = Annotated[
    int | None,
    typer.Option("--ports-from", help="Count all ports from this one, for several nodes here."),
]
Metrics = Annotated[
    int | None, typer.Option("--metrics-port", help="Ray's metrics, open to all; default 8080.")
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure-without-token", help="Let everybody who reaches it run commands."),
]


@app.command()
def head(
    context: typer.Context,
    ip: Annotated[
        str, typer.Option(help="Address of this machine that other nodes reach.")
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Of the cluster; default 6379.")] = None,
    dashboard_port: Annotated[
        int | None, typer.Option(help="On 127.0.0.1 only; default 8265.")
    ] = None,
    metrics_port: Metrics = None,
    ports_from: PortsFrom = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    role: Roles = None,
    object_store: ObjectStore = None,
    folder: Folder = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Default: FOLDER/token, made if there is none.")
    ] = None,
    redis: Annotated[
        str,
        typer.Option(
            envvar="M3PC_RAY_REDIS",
            help="redis://HOST:PORT, with a password in the variable only: the cluster outlives "
            "its control process.",
        ),
    ] = "",
    insecure: Insecure = False,
) -> None:
    """Start a cluster, on loopback unless --ip says otherwise."""
    from m3pc.core.token_file import make_token
    from m3pc.ray_nodes.connection import OBJECT_STORE
    from m3pc.ray_nodes.node import Node, check_ip, require_entry
    from m3pc.ray_nodes.ports import node_ports

    _begin()
    require_entry(os.environ, insecure=insecure)
    given = {"gcs": port, "dashboard": dashboard_port, "metrics": metrics_port}
    ports = node_ports(ports_from, **given)
    own, store, roles = check_ip(ip, os.environ), _store(redis, context), _roles(role)
    place = _place(folder, ports.of["gcs"])
    _run(
        Node(
            joins=None,
            ip=own,
            ports=ports,
            folder=place,
            token=None if insecure else make_token((token_file or place / "token").absolute()),
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
        str | None, typer.Option(help="Of this machine; default: the one that the head sees.")
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
        typer.Option(envvar="RAY_AUTH_TOKEN_PATH", help="A copy of the head's, of mode 0600."),
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Join a cluster, and join it again whenever it was lost."""
    from m3pc.core.token_file import check_token
    from m3pc.ray_nodes.connection import OBJECT_STORE
    from m3pc.ray_nodes.node import Node, check_ip, own_address, require_entry
    from m3pc.ray_nodes.ports import node_ports
    from m3pc.types import InputError

    _begin()
    require_entry(os.environ, insecure=insecure)
    if token_file is None and not insecure:
        raise InputError(
            "no token file is given; copy the head's to this machine (mode 0600) and name it by "
            "--token-file or RAY_AUTH_TOKEN_PATH"
        )
    token = check_token(token_file.absolute()) if token_file and not insecure else None
    own = check_ip(ip or own_address(address), os.environ)
    roles = _roles(role)
    ports = node_ports(ports_from, metrics=metrics_port)
    _run(
        Node(
            joins=address,
            ip=own,
            ports=ports,
            folder=_place(folder, ports.of["node-manager"]),
            token=token,
            roles=roles,
            cpus=cpus,
            gpus=gpus,
            object_store=object_store or OBJECT_STORE,
        )
    )


@app.command("ports")
def show_ports(ports_from: PortsFrom = None) -> None:
    """Every port on which a node listens, as a table in Markdown."""
    from m3pc.ray_nodes.ports import ports_table

    typer.echo(ports_table(ports_from))


def _begin() -> None:
    """What is made from now on is its owner's alone; what happens is told on stderr."""
    import logging

    os.umask(0o077)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s level=%(levelname)s %(message)s", force=True
    )


def _place(folder: Path | None, port: int) -> Path:
    from m3pc.core.token_file import private_folder
    from m3pc.ray_nodes.node import check_length, default_folder

    return private_folder(check_length((folder or default_folder(port)).absolute()))


def _roles(given: list[str] | None) -> tuple[str, ...]:
    from m3pc.ray_nodes.node import ROLES
    from m3pc.types import InputError

    for role in given or ():
        if role not in ROLES:
            raise InputError(f"--role is {role!r}; give one of {', '.join(ROLES)}")
    return tuple(dict.fromkeys(given or ()))


def _store(redis: str, context: typer.Context) -> "GcsStore | None":
    from m3pc.ray_nodes.gcs_storage import VARIABLE, gcs_store
    from m3pc.types import InputError

    if not redis:
        return None
    found = gcs_store(redis)
    source = context.get_parameter_source("redis")
    if found.password and (source is None or source.name != "ENVIRONMENT"):
        raise InputError(
            "--redis holds a password, which everybody on this machine can read in the list of "
            f"processes; give the address in the variable {VARIABLE} instead, and change it"
        )
    return found


def _run(node: "Node") -> None:
    from m3pc.ray_nodes.supervisor import keep

    raise typer.Exit(keep(node, lambda: _show(node)))


def _show(node: "Node") -> None:
    """What somebody in another shell, or on another machine, needs to know."""
    entry = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={node.token} " if node.token else ""
    shown = f"--token-file {node.token}" if node.token else "--insecure-without-token"
    if not node.is_head:
        typer.echo(f"joined: {node.address} as {node.ip}")
        return
    typer.echo(
        f"address:   {node.address}\n"
        f"dashboard: {node.dashboard}\n"
        f"token:     {node.token or 'none: everybody may come in'}\n"
        f"use it:    {entry}m3pc resume RUN --address {node.address}\n"
        f"submit:    {entry}m3pc submit --address {node.dashboard} -- finetune ...\n"
        f"join it:   m3pc node worker --address {node.address} {shown}"
        f"{' --ports-from 21000' if node.ip == '127.0.0.1' else ''}"
    )
