"""How the processes of a group of learners find each other."""

import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta

from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from learner.process_group import DistributedGroup, PeersLostError

# By device. Broadcasts and counts are on the CPU in any case.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The address at which the learners of a group connect, and their deadline."""

    host: str
    port: int
    size: int  # learners
    device: str
    seconds: float  # how long a learner waits for the others, to join and in every exchange


def create_rendezvous(
    host: str, *, size: int, device: str, seconds: float
) -> tuple[Rendezvous, TCPStore]:
    """Open a rendezvous on this machine, at `host`. This process passes the store to `join`; others
    pass the rendezvous alone."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return Rendezvous(host=host, port=port, size=size, device=device, seconds=seconds), store


def join(rendezvous: Rendezvous, rank: int, store: TCPStore | None = None) -> DistributedGroup:
    """Wait until all learners have joined; PeersLostError if this takes too long."""
    timeout = timedelta(seconds=rendezvous.seconds)
    if rendezvous.host.startswith("127.") and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        distributed.init_process_group(
            BACKENDS[rendezvous.device],
            store=store or TCPStore(rendezvous.host, rendezvous.port, timeout=timeout),
            rank=rank,
            world_size=rendezvous.size,
            timeout=timeout,
        )
    except RuntimeError as error:
        raise PeersLostError(
            f"{rendezvous.size} learners did not come together within {rendezvous.seconds:g} "
            f"seconds: {error}; check whether the cluster has the CPUs and GPUs that "
            "fleet.learners and fleet.learner_gpus ask for"
        ) from error
    return DistributedGroup()
