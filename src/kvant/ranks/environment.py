"""This process's place among the ranks, from the launcher's environment variables."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvant.errors import RanksError, one_line

GUARD = "KVANT_GUARD"
RANK = "MLX_RANK"
LAUNCHER = "KVANT_LAUNCHER"  # the launcher's process id on this machine
MPI = [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")]
BACKENDS = {"MLX_HOSTFILE": "ring", "MLX_IBV_DEVICES": "jaccl", "MLX_WORLD_SIZE": "nccl"}


@dataclass(frozen=True, slots=True)
class Place:
    """A rank, and the address of rank 0's guard."""

    rank: int
    size: int  # 2 or more
    backend: str  # MLX's: "ring", "jaccl", "nccl" or "mpi"
    host: str
    port: int


def find_place(environ: Mapping[str, str]) -> Place | None:
    """Return this process's place, or None without a launcher or in a group of one.

    The guard listens at ``KVANT_GUARD``, or else one port below MLX's on rank 0.
    The variables are those of ``mlx.launch`` (mlx/_distributed_utils/launch.py) and of MPI's launchers.
    """
    backend = next((backend for name, backend in BACKENDS.items() if name in environ), "mpi")
    rank_name, size_name = next((names for names in MPI if names[0] in environ), (RANK, ""))
    if backend == "mpi" and not size_name:
        return None
    try:
        size, address = (int(environ[size_name]), "") if backend == "mpi" else _group(environ, backend)
        if size < 2:
            return None
        rank = int(environ[RANK if backend != "mpi" else rank_name])
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}")
        if not (guard_address := environ.get(GUARD)) and backend == "mpi":
            raise ValueError(
                f"MPI needs {GUARD}=HOST:PORT, an address of rank 0's machine (mpirun -x {GUARD}=...)"
            )
        host, port = _address(guard_address) if guard_address else _address(address, before=1)
    except KeyError as error:
        raise RanksError(f"MLX's back end {backend!r} needs {error.args[0]} in the environment") from error
    except (OSError, ValueError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise RanksError(
            f"the launcher's variables for MLX's back end {backend!r}: {one_line(error)}"
        ) from error
    return Place(rank, size, backend, host, port)


def _group(environ: Mapping[str, str], backend: str) -> tuple[int, str]:
    """Return the number of ranks, and MLX's address on rank 0."""
    if backend == "ring":
        hosts = _read_list(environ["MLX_HOSTFILE"])
        return len(hosts), hosts[0][0] if len(hosts) > 1 else ""
    if backend == "jaccl":
        return len(_read_list(environ["MLX_IBV_DEVICES"])), environ["MLX_JACCL_COORDINATOR"]
    return int(environ["MLX_WORLD_SIZE"]), f"{environ['NCCL_HOST_IP']}:{environ['NCCL_PORT']}"


def _read_list(file: str) -> list[Any]:
    """Read a file's JSON list; the launcher leaves the file empty for one rank."""
    items = json.loads(Path(file).read_text(encoding="utf-8").strip() or "[]")
    if not isinstance(items, list):
        raise ValueError(f"{file}: expected a JSON list, one item for each rank")
    return items


def _address(text: str, before: int = 0) -> tuple[str, int]:
    """Return the host of "HOST:PORT" or "[IPv6]:PORT", and the port minus ``before``."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or not 1 < int(port) < 65536:
        raise ValueError(f"the address is {text!r}; expected HOST:PORT, a port from 2 to 65535")
    return host, int(port) - before
