"""The machines of a run, and what each rank on them is started with: MLX's own host files and variables."""

import json
import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from getpass import getuser
from ipaddress import ip_address
from pathlib import Path

from kvant.errors import RanksError, one_line
from kvant.ranks.environment import GUARD, LAUNCHED, RANK
from kvant.ranks.launcher import RankCommand

BACKENDS = ("ring", "jaccl", "jaccl-ring", "nccl")
STARTING_PORT = 32323  # mlx.launch's; rank 0's guard listens one below
LOOPBACK = "127.0.0.1"
# What says that a process is a rank. None is inherited from whoever launches.
VARIABLES = (
    GUARD, LAUNCHED, RANK, "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR", "MLX_JACCL_RING",
    "NCCL_HOST_IP", "NCCL_PORT", "MLX_WORLD_SIZE",
)  # fmt: skip
# No password is asked for: nobody could say whose it is. "~" is a character like any other.
SSH = ("ssh", "-e", "none", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "LogLevel=ERROR")


@dataclass(frozen=True, slots=True)
class Host:
    """Where a rank runs.

    Attributes:
        name: what ssh calls it.
        ips: addresses for MLX's back end.
        rdma: for JACCL a device for each rank, None for itself; or several devices.
    """

    rank: int
    name: str
    ips: Sequence[str] = ()
    rdma: Sequence[str | Sequence[str] | None] = ()


@dataclass(frozen=True, slots=True)
class HostFile:
    """Who is in a run, over which back end, with which variables, NAME=VALUE each.

    Attributes:
        backend: empty: the machine's own.
    """

    hosts: Sequence[Host]
    backend: str = ""
    envs: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """What makes processes the ranks of one group.

    Attributes:
        files: a variable, which names a file, and the file's text.
        variables: of every rank.
        own: of each rank, in their order.
    """

    files: Mapping[str, str]
    variables: Mapping[str, str]
    own: Sequence[Mapping[str, str]]


def read_hosts(path: Path) -> HostFile:
    """MLX's host file, as mlx.distributed_config writes it: an object with "hosts", or their list alone.

    Raises:
        RanksError: it is not there, or is not a host file.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # UnicodeDecodeError is one
        raise RanksError(f"host file {path} cannot be read: {one_line(error)}") from error
    table = raw if isinstance(raw, dict) else {"hosts": raw}
    listed, backend, envs = table.get("hosts"), table.get("backend", ""), table.get("envs", [])
    if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
        raise RanksError(f"host file {path} has no list of hosts")
    if not isinstance(backend, str) or not _texts(envs):
        raise RanksError(f"host file {path}: expected backend as a string, envs as a list of strings")
    hosts = []
    for rank, each in enumerate(listed):
        name, ips, rdma = each.get("ssh"), each.get("ips", []), each.get("rdma", [])
        if not isinstance(name, str) or not name or name.startswith("-"):  # else an option of ssh
            raise RanksError(f"host file {path}: rank {rank}: ssh is {name!r}; expected a host's name")
        if not _texts(ips) or not isinstance(rdma, list):
            raise RanksError(f"host file {path}: rank {rank}: expected ips and rdma as lists")
        hosts.append(Host(rank, name, ips, rdma))
    return HostFile(hosts, backend, envs)


def local_hosts(count: int) -> HostFile:
    """Ranks that are all on this machine."""
    return HostFile([Host(rank, LOOPBACK, [LOOPBACK]) for rank in range(count)])


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on, so that two runs at once do not meet."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


def make_group(hosts: Sequence[Host], backend: str, ports: Sequence[int]) -> Group:
    """The variables of each rank, as mlx.launch sets them, and where rank 0's guard listens.

    Args:
        hosts: of the ranks, in their order; one alone is no group.
        ports: the guard's, and those of the back end: for the ring one for each address.

    Raises:
        RanksError: a host lacks what the back end needs.
    """
    if len(hosts) == 1:
        return Group({}, {}, [{}])
    guard, *rest = ports
    first = hosts[0].ips[0] if hosts[0].ips else ""
    own = [{RANK: str(rank)} for rank in range(len(hosts))]
    if backend == "ring":
        for host in hosts:
            if not host.ips:
                raise RanksError(f"rank {host.rank}, {host.name}, has no ips; the ring needs one of each rank")
        following = iter(rest)
        ring = [[f"{ip}:{port}" for ip, port in zip(host.ips, following, strict=False)] for host in hosts]
        return Group({"MLX_HOSTFILE": json.dumps(ring)}, {GUARD: f"{first}:{guard}", LAUNCHED: "1"}, own)
    if not first:
        raise RanksError(f"rank 0, {hosts[0].name}, has no ips; the other ranks need one to reach it")
    variables = {GUARD: f"{first}:{guard}", LAUNCHED: "1"}
    if backend == "nccl":
        variables |= {"NCCL_HOST_IP": first, "NCCL_PORT": str(rest[0]), "MLX_WORLD_SIZE": str(len(hosts))}
        seen: dict[str, int] = {}
        for host, each in zip(hosts, own, strict=True):  # a machine's first rank has its first GPU
            each["CUDA_VISIBLE_DEVICES"] = str(seen.setdefault(host.name, 0))
            seen[host.name] += 1
        return Group({}, variables, own)
    ring_only = backend == "jaccl-ring"
    _check_rdma(hosts, ring_only)
    variables["MLX_JACCL_COORDINATOR"] = f"{first}:{rest[0]}"
    if ring_only:
        variables["MLX_JACCL_RING"] = "1"
    return Group({"MLX_IBV_DEVICES": json.dumps([host.rdma for host in hosts])}, variables, own)


def _check_rdma(hosts: Sequence[Host], ring_only: bool) -> None:
    count = len(hosts)
    for host in hosts:
        if len(host.rdma) != count or host.rdma[host.rank] is not None:
            raise RanksError(
                f"rank {host.rank}, {host.name}: rdma is {list(host.rdma)}; expected {count} devices, "
                f"null for the rank itself (mlx.distributed_config writes them)"
            )
        neighbours = {(host.rank - 1) % count, (host.rank + 1) % count} if ring_only else range(count)
        for other in neighbours:
            if other != host.rank and host.rdma[other] is None:
                raise RanksError(f"rank {host.rank}, {host.name}, has no RDMA device for rank {other}")


def count_ports(hosts: Sequence[Host]) -> int:
    """How many ports in a row a run takes, the guard's with them."""
    return 1 + sum(max(1, len(host.ips)) for host in hosts)


def rank_commands(
    hosts: Sequence[Host],
    group: Group,
    words: Sequence[str],
    variables: Mapping[str, str],
    *,
    cwd: str | None,
    folder: Path,
    terminal: bool,
) -> list[RankCommand]:
    """How each rank is started: as a child, or by ssh.

    Args:
        words: the command, the same on every machine.
        variables: more of them, for every rank.
        cwd: the folder the command runs in; None: this one, where a machine has it.
        folder: for the files of ranks that run here.
        terminal: rank 0 has a terminal, elsewhere too.
    """
    found = []
    for host in hosts:
        added = {**variables, **group.variables, **group.own[host.rank]}
        name = host.name
        if is_here(host):
            for variable, text in group.files.items():
                path = folder / variable
                path.write_text(text)
                added[variable] = str(path)
            inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
            found.append(RankCommand(words, {**inherited, **added}, cwd))
            continue
        script = _remote_script(words, added, group.files, cwd)
        # On a terminal there, what runs is hung up on when the connection ends.
        way = "-tt" if terminal or host.rank else "-T"
        found.append(RankCommand([*SSH, way, "--", name, f"exec /bin/sh -c {shlex.quote(script)}"], host=name))
    return found


def _remote_script(
    words: Sequence[str], variables: Mapping[str, str], files: Mapping[str, str], cwd: str | None
) -> str:
    """What a shell of another machine does: in the end it becomes the command, whose parent is ssh's server then."""
    steps = [f"cd {shlex.quote(cwd)} || exit 126" if cwd else f"cd {shlex.quote(os.getcwd())} 2>/dev/null"]
    for name, text in files.items():
        steps.append(f'{name}=$(mktemp) && printf %s {shlex.quote(text)} >"${name}" || exit 126; export {name}')
    steps += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "; ".join([*steps, f"exec {shlex.join(words)}"])


def is_here(host: Host) -> bool:
    """Whether a host is this machine: by its name, or because one of its addresses is this machine's."""
    user, _, name = host.name.rpartition("@")
    if user and user != getuser():
        return False
    if name in (LOOPBACK, "::1", "localhost"):
        return True
    own = socket.gethostname()
    return name.removesuffix(".local") == own.removesuffix(".local") or any(map(_is_own, [name, *host.ips]))


def _is_own(address: str) -> bool:
    """Whether an address is one of this machine's. A host's name is none."""
    try:
        family = socket.AF_INET if ip_address(address).version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as tried:
            tried.bind((address, 0))
    except (ValueError, OSError):
        return False
    return True


def _texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
