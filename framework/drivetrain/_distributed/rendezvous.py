"""Where processes meet: a store that listens where it is asked to, and lets in the processes of one job alone."""

from __future__ import annotations

import errno
import ipaddress
import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from drivetrain._distributed.job_identity import Job
from drivetrain.errors import ConfigurationError

_SIGNED = "drivetrain/job"  # the job whose store it is
_SIGNS_WITHIN = timedelta(seconds=60)
_ELSEWHERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # an address that leads here, and is not of this machine


def host(address: str, port: int, *, num_nodes: int = 1, job: Job | None = None) -> TCPStore:
    """Host the store where the processes of a job meet.

    Args:
        address: by which all of them reach this machine. The store listens there and nowhere else: on the loopback
            device for 127.0.0.1. Where it is a name and there are several nodes, or where it is no address of this
            machine's, it listens on all of them: a machine's own name often leads to its loopback device.
        port: where to listen; 0 lets the operating system choose.
        num_nodes: how many machines the processes are on.
        job: whose it is; others are refused by `admit`. None lets the first comer say, by `admit_first`.

    Raises:
        ConfigurationError: the port is taken, or nothing can be hosted there.
    """
    return host_on(listen(address, port, num_nodes), address, job)


def listen(address: str, port: int, num_nodes: int) -> socket.socket:
    """Listen for a store that `host_on` makes later; who connects meanwhile waits.

    Raises:
        ConfigurationError: as for `host`.
    """
    try:
        for family, where in _addresses(address, num_nodes):
            try:
                return socket.create_server((where, port), family=family, backlog=socket.SOMAXCONN)
            except OSError as error:
                if error.errno not in _ELSEWHERE:
                    raise
        return _listen_on_all(port)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"rank 0 cannot host the store at {address}:{port}: port {port} is taken",
                "another process listens there: of another job that was given the same port, or of one that is ending",
                "set MASTER_PORT to a free port, the same for all processes of this job and for no other job",
            ) from error
        raise _cannot_host(address, port, error) from error


def host_on(listener: socket.socket, address: str, job: Job | None) -> TCPStore:
    """Host a store on what `listen` has returned, which is the store's from then on."""
    port = listener.getsockname()[1]
    try:
        store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    except RuntimeError as error:
        raise _cannot_host(address, port, error) from error
    if job is not None:
        store.set(_SIGNED, job.encode())
    return store


def admit(store: TCPStore, job: Job, rank: int, address: str, port: int) -> None:
    """Make sure that this process has come to its own job's store, and that nobody has come as its rank before.

    Args:
        store: a connection to it.
        job: this process's.
        rank: this process's.
        address: for the error.
        port: for the error.

    Raises:
        ConfigurationError: it is another job's, or the rank is there already. The other job notices nothing.
    """
    try:
        store.wait([_SIGNED], _SIGNS_WITHIN)
    except RuntimeError as error:
        raise ConfigurationError(
            f"rank {rank} came to {address}:{port}, and what is there is no store of this job's",
            "whoever hosts it has not said whose it is: a program of another kind, it seems, has the port",
            "set MASTER_PORT to a free port, the same for all processes of this job and for no other job",
        ) from error
    _compare(job, Job.decode(store.get(_SIGNED)), rank, address, port)
    if store.add(f"{_SIGNED}/rank{rank}", 1) > 1:
        raise ConfigurationError(
            f"rank {rank} came to {address}:{port}, where a rank {rank} is already",
            "the same command was started twice with one port, or one rank was started again while the others go on",
            "give each job a MASTER_PORT of its own, and start all ranks of a job together",
        )


def admit_first(store: TCPStore, job: Job, rank: int, address: str, port: int) -> None:
    """Do as `admit` for a store whose host says nothing: it is the job's that came first.

    Ranks may come again: such a store may outlive them, as torchrun's does.

    Raises:
        ConfigurationError: it is another job's.
    """
    _compare(job, Job.decode(store.compare_set(_SIGNED, "", job.encode())), rank, address, port)


def _compare(mine: Job, theirs: Job, rank: int, address: str, port: int) -> None:
    why = mine.why_another(theirs)
    if why:
        raise ConfigurationError(
            f"rank {rank} came to {address}:{port}, where the processes of another job meet",
            f"both were given port {port}, and were taken apart: {why}",
            "set MASTER_PORT to another port for all processes of this job; where the two are one job after all, set "
            "TORCHELASTIC_RUN_ID to the same name for all of its processes",
        )


def _addresses(address: str, num_nodes: int) -> list[tuple[socket.AddressFamily, str]]:
    """Where to listen, in the order to be tried; nothing stands for everywhere."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        if num_nodes > 1 and address != "localhost":
            return []
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
        return [(family, str(where[0])) for family, _, _, _, where in found]
    return [(socket.AF_INET if number.version == 4 else socket.AF_INET6, address)]


def _listen_on_all(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=socket.SOMAXCONN, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno not in _ELSEWHERE:  # IPv6 may be compiled in, and switched off
                raise
    return socket.create_server(("", port), backlog=socket.SOMAXCONN)


def _cannot_host(address: str, port: int, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"rank 0 cannot host the store at {address}:{port}: {error}",
        "all processes meet there",
        "set MASTER_ADDR to a name of this machine and MASTER_PORT to a free port",
    )
