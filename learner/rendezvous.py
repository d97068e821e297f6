"""How the processes of a group of learners find each other."""

import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta

from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from learner.process_group import DistributedGroup, PeersLostError

# By device. What is told and counted is on the CPU in any case.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where they meet, and how long each then waits for the others."""

    host: str
    port: int
    size: int  # learners
    device: str
    seconds: float


def invite(host: str, *, size: int, device: str, seconds: float) -> tuple[Rendezvous, TCPStore]:
    """A place to meet at an address of this machine; the second is for who invites, to join by."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    table = TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return Rendezvous(host=host, port=port, size=size, device=device, seconds=seconds), table


def join(meeting: Rendezvous, rank: int, table: TCPStore | None = None) -> DistributedGroup:
    """Once all are there; MatesLostError where they do not come in time."""
    patience = timedelta(seconds=meeting.seconds)
    if meeting.host.startswith("127.") and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        distributed.init_process_group(
            BACKENDS[meeting.device],
            store=table or TCPStore(meeting.host, meeting.port, timeout=patience),
            rank=rank,
            world_size=meeting.size,
            timeout=patience,
        )
    except RuntimeError as error:
        raise PeersLostError(
            f"{meeting.size} learners did not come together within {meeting.seconds:g} seconds: "
            f"{error}; look whether the cluster has the CPUs and GPUs that fleet.learners and "
            "fleet.learner_gpus ask for"
        ) from error
    return DistributedGroup()
