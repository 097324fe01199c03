"""Rendezvous: hosts a store at an address, and refuses processes of other jobs."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from drivetrain.errors import ConfigurationError, DistributedError

NO_NAME = "none"
"""The name of every job that its launcher gives no name. torchrun's default is the same."""

_JOB_KEY = "drivetrain/job"  # the key with the name of the store's job
_JOB_KEY_TIMEOUT = timedelta(seconds=60)
_REQUEST_TIMEOUT = timedelta(minutes=5)
# Error numbers for an address that reaches this machine but is not assigned to this machine.
_NOT_LOCAL = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def connect(
    address: str, port: int, job: str | None, rank: int, timeout: timedelta, *, outlives_ranks: bool = False
) -> TCPStore:
    """Connect to the store where the processes of a job meet.

    Args:
        address: the address of the store.
        port: the port of the store.
        job: the name of this process's job, or None.
        rank: this process's rank.
        timeout: how long to try to connect.
        outlives_ranks: whether the store belongs to an agent such as torchrun's, which may start the ranks again.

    Raises:
        DistributedError: there is no store.
        ConfigurationError: the store belongs to another job, or the rank is taken.
    """
    try:
        store = TCPStore(address, port, is_master=False, timeout=timeout)
        (admit_first if outlives_ranks else admit)(store, job or NO_NAME, rank, address, port)
    except RuntimeError as error:
        raise DistributedError(
            f"rank {rank} finds no store of its job at {address}:{port}: {error}",
            "all ranks connect to it, and "
            + ("the agent that started rank 0 hosts it" if outlives_ranks else "rank 0 or its launcher hosts it"),
            "check whether rank 0 has failed, and whether MASTER_ADDR and MASTER_PORT lead to it from this machine",
        ) from error
    store.set_timeout(_REQUEST_TIMEOUT)
    return store


def host(address: str, port: int, *, num_nodes: int = 1, job: str | None = None) -> TCPStore:
    """Host the store where the processes of a job meet.

    Args:
        address: the address by which all processes reach this machine. The store listens only at this
            address, for example on the loopback device for 127.0.0.1. The store listens on all addresses if
            ``address`` is a name and there are several nodes, because the name of a machine often resolves to the
            loopback device on that machine, or if ``address`` is not an address of this machine.
        port: the port; 0 lets the operating system choose.
        num_nodes: the number of machines that the processes run on.
        job: the name of the store's job, or `NO_NAME`. `admit` refuses processes of other jobs. With None, the first
            process that calls `admit_first` sets the job.

    Raises:
        ConfigurationError: the port is taken, or nothing can be hosted at the address.
    """
    return host_on(listen(address, port, num_nodes), address, job)


def listen(address: str, port: int, num_nodes: int) -> socket.socket:
    """Open a listening socket for a store that `host_on` makes later. Clients that connect before that wait.

    Raises:
        ConfigurationError: as for `host`.
    """
    try:
        for family, ip in _addresses(address, num_nodes):
            try:
                return socket.create_server((ip, port), family=family, backlog=socket.SOMAXCONN)
            except OSError as error:
                if error.errno not in _NOT_LOCAL:
                    raise
        return _listen_on_all(port)
    except (OSError, OverflowError) as error:
        raise _cannot_host(address, port, error) from error


def host_on(listener: socket.socket, address: str, job: str | None) -> TCPStore:
    """Host a store on the socket from `listen`, which the store then owns."""
    port = listener.getsockname()[1]
    try:
        store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    except RuntimeError as error:
        raise _cannot_host(address, port, error) from error
    if job is not None:
        store.set(_JOB_KEY, job)
    return store


def name_new_job(num_nodes: int) -> str:
    """Return the name of a job whose processes this process is about to start.

    On one node the name is new. Several nodes start processes before they can agree on a name.
    """
    return os.urandom(8).hex() if num_nodes == 1 else NO_NAME


def admit(store: TCPStore, job: str, rank: int, address: str, port: int) -> None:
    """Check that the store belongs to the job of this process, and that no other process has the same rank.

    Args:
        store: a connection to the store.
        job: the name of this process's job, or `NO_NAME`.
        rank: this process's rank.
        address: the store's address, for errors.
        port: the store's port, for errors.

    Raises:
        ConfigurationError: the store belongs to another job, which is not affected, or the rank is taken.
    """
    store.wait([_JOB_KEY], _JOB_KEY_TIMEOUT)
    _refuse_other_job(job, store.get(_JOB_KEY).decode(), rank, address, port)
    if store.add(f"{_JOB_KEY}/rank{rank}", 1) > 1:
        raise ConfigurationError(
            f"rank {rank} connected to {address}:{port}, where another process is already rank {rank}",
            "the same command was started twice with one port, or one rank was restarted while the others keep running",
            "give each job a MASTER_PORT of its own, and start all ranks of a job together",
        )


def admit_first(store: TCPStore, job: str, rank: int, address: str, port: int) -> None:
    """Check the job as `admit` does, for a store whose host does not set a job.

    The store belongs to the first job that connects. A rank may connect again, because such a store may outlive the
    ranks, as torchrun's store does.

    Raises:
        ConfigurationError: the store belongs to another job.
    """
    _refuse_other_job(job, store.compare_set(_JOB_KEY, "", job).decode(), rank, address, port)


def _refuse_other_job(job: str, store_job: str, rank: int, address: str, port: int) -> None:
    if job != store_job:
        other_name, own_name = ("a job without a name" if name == NO_NAME else repr(name) for name in (store_job, job))
        raise ConfigurationError(
            f"rank {rank} connected to {address}:{port}, where the processes of another job meet",
            f"both jobs use port {port}; the other job is {other_name}, and this job is {own_name}",
            "set MASTER_PORT to another port for all processes of this job; if all processes belong to one job, set "
            "TORCHELASTIC_RUN_ID to the same name for all of them",
        )


def _addresses(address: str, num_nodes: int) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses to try, in order. An empty list stands for all addresses of this machine."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        if num_nodes > 1 and address != "localhost":
            return []
        infos = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
        return [(family, str(sockaddr[0])) for family, _, _, _, sockaddr in infos]
    return [(socket.AF_INET if number.version == 4 else socket.AF_INET6, address)]


def _listen_on_all(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=socket.SOMAXCONN, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno not in _NOT_LOCAL:  # IPv6 may be compiled in but disabled
                raise
    return socket.create_server(("", port), backlog=socket.SOMAXCONN)


def _cannot_host(address: str, port: int, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"rank 0 cannot host the store at {address}:{port}: {error}",
        "all processes connect to this store. A port in use belongs to another job, or to a job that is still ending",
        "set MASTER_ADDR to a name of this machine, and MASTER_PORT to a free port, the same for all processes of this "
        "job and for no other job",
    )
