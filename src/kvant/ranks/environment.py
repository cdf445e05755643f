"""This process's place among the ranks, as a launcher wrote it into the environment."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvant.errors import RanksError

GUARD, RANK = "KVANT_GUARD", "MLX_RANK"
LAUNCHED = "KVANT_LAUNCH"  # rank 0 has the terminal or the pipe itself; mlx.launch copies its input to all ranks
MPI = [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")]


@dataclass(frozen=True, slots=True)
class Place:
    """A rank, and where the others find rank 0.

    Attributes:
        rank: of this process, from 0.
        size: ranks in all, 2 or more.
        backend: MLX's: "ring", "jaccl", "nccl" or "mpi".
        host: where rank 0's guard listens: an address or a name.
        port: with it.
    """

    rank: int
    size: int
    backend: str
    host: str
    port: int


def find_place(environ: Mapping[str, str]) -> Place | None:
    """This process's place. None without a launcher, and in a group of one.

    The guard listens where ``KVANT_GUARD`` says, otherwise one port below the one that MLX uses on rank 0.
    The variables are those of ``mlx.launch`` (mlx/_distributed_utils/launch.py) and of MPI's launchers.

    Raises:
        RanksError: variables that are incomplete or malformed.
    """
    if "MLX_HOSTFILE" in environ:
        backend, (size, address) = "ring", _hosts(environ["MLX_HOSTFILE"])
    elif "MLX_JACCL_COORDINATOR" in environ or "MLX_IBV_DEVICES" in environ:
        backend, size = "jaccl", len(_read_list("MLX_IBV_DEVICES", _needed(environ, "MLX_IBV_DEVICES", "jaccl")))
        address = ("MLX_JACCL_COORDINATOR", _needed(environ, "MLX_JACCL_COORDINATOR", "jaccl"))
    elif "MLX_WORLD_SIZE" in environ:
        backend, size = "nccl", _number(environ, "MLX_WORLD_SIZE")
        nccl = f"{_needed(environ, 'NCCL_HOST_IP', 'nccl')}:{_needed(environ, 'NCCL_PORT', 'nccl')}"
        address = ("NCCL_HOST_IP:NCCL_PORT", nccl)
    elif found := [names for names in MPI if names[0] in environ and names[1] in environ]:
        return _mpi(environ, *found[0])
    elif RANK in environ:
        raise RanksError(
            "MLX_RANK is set, but none of MLX_HOSTFILE (ring), MLX_JACCL_COORDINATOR (jaccl) and MLX_WORLD_SIZE (nccl)"
        )
    else:
        return None
    if size < 2:
        return None
    _needed(environ, RANK, backend)
    rank = _rank(environ, RANK, size)
    if GUARD in environ:
        return Place(rank, size, backend, *_address(GUARD, environ[GUARD]))
    host, port = _address(*address)
    return Place(rank, size, backend, host, port - 1)


def _mpi(environ: Mapping[str, str], rank_name: str, size_name: str) -> Place | None:
    size = _number(environ, size_name)
    if size < 2:
        return None
    if GUARD not in environ:
        raise RanksError(
            f"MPI does not say where rank 0 is; expected {GUARD}=HOST:PORT, an address of rank 0's machine and a free "
            f"port (mpirun -x {GUARD}=HOST:PORT)"
        )
    return Place(_rank(environ, rank_name, size), size, "mpi", *_address(GUARD, environ[GUARD]))


def _hosts(file: str) -> tuple[int, tuple[str, str]]:
    """Ranks in a ring's host file, and the first address of rank 0 with the name of where it stands."""
    hosts = _read_list("MLX_HOSTFILE", file)
    if not all(isinstance(host, list) and host and all(isinstance(each, str) for each in host) for host in hosts):
        raise RanksError(f'MLX_HOSTFILE {file}: expected [["IP:PORT", ...], ...], a list for each rank')
    return len(hosts), (f"MLX_HOSTFILE {file}", hosts[0][0] if hosts else "")


def _read_list(name: str, file: str) -> list[Any]:
    """A JSON list; an empty file is an empty one, which the launcher writes for one rank."""
    try:
        text = Path(file).read_text(encoding="utf-8").strip()
        found = json.loads(text) if text else []
    except OSError as error:
        raise RanksError(f"{name} {file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RanksError(f"{name} {file} is no JSON: {error}") from error
    if not isinstance(found, list):
        raise RanksError(f"{name} {file}: expected a JSON list, one item for each rank")
    return found


def _needed(environ: Mapping[str, str], name: str, backend: str) -> str:
    if not environ.get(name):
        raise RanksError(f"MLX's back end {backend!r} needs {name} in the environment, which is not set")
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise RanksError(f"{name} is {text!r}; expected a whole number")
    return int(text)


def _rank(environ: Mapping[str, str], name: str, size: int) -> int:
    rank = _number(environ, name)
    if rank >= size:
        raise RanksError(f"{name} is {rank}; expected 0 to {size - 1}, for there are {size} ranks")
    return rank


def _address(name: str, text: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT" or "[IPv6]:PORT"."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or not 1 < int(port) < 65536:
        raise RanksError(f"{name}: the address is {text!r}; expected HOST:PORT, a port from 2 to 65535")
    return host, int(port)
