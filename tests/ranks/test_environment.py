"""A rank's place among the others, from what a launcher writes into the environment."""

import json
from pathlib import Path

import pytest

from kvant.errors import RanksError
from kvant.ranks.environment import Place, find_place

HOSTS = json.dumps([["10.0.0.1:32323", "10.0.1.1:32324"], ["10.0.0.2:32325"], ["10.0.0.3:32326"]])
DEVICES = json.dumps([[None, "rdma_en2"], ["rdma_en2", None]])
RING = {"MLX_HOSTFILE": "HERE", "MLX_RANK": "2"}
FIRST = RING | {"MLX_RANK": "0"}
NCCL = {"NCCL_HOST_IP": "10.0.0.1", "NCCL_PORT": "12345", "MLX_WORLD_SIZE": "4", "MLX_RANK": "3"}
JACCL = {"MLX_IBV_DEVICES": "HERE", "MLX_JACCL_COORDINATOR": "10.0.0.1:32323", "MLX_RANK": "1"}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
GUARD = {"KVANT_GUARD": "10.0.0.1:5000"}


def find(environ: dict[str, str], folder: Path, text: str) -> Place | None:
    (folder / "hosts.json").write_text(text)
    return find_place(
        {name: value.replace("HERE", str(folder / "hosts.json")) for name, value in environ.items()}
    )


@pytest.mark.parametrize(
    ("environ", "text", "place"),
    [
        ({"PATH": "/bin"} | GUARD, "", None),
        (RING, HOSTS, Place(2, 3, "ring", "10.0.0.1", 32322)),
        (RING | {"KVANT_GUARD": "a.local:7"}, HOSTS, Place(2, 3, "ring", "a.local", 7)),
        (RING | {"KVANT_GUARD": "[fe80::1%en0]:7"}, HOSTS, Place(2, 3, "ring", "fe80::1%en0", 7)),
        (FIRST, "\n", None),
        (FIRST, '[["10.0.0.1:5000"]]', None),
        (JACCL, DEVICES, Place(1, 2, "jaccl", "10.0.0.1", 32322)),
        (NCCL, "", Place(3, 4, "nccl", "10.0.0.1", 12344)),
        (NCCL | {"MLX_RANK": "0", "MLX_WORLD_SIZE": "1"}, "", None),
        (MPI | GUARD, "", Place(1, 2, "mpi", "10.0.0.1", 5000)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "", None),
    ],
)
def test_a_place(tmp_path: Path, environ: dict[str, str], text: str, place: Place | None) -> None:
    assert find(environ, tmp_path, text) == place


GUARDS = ("5000", "10.0.0.1", "10.0.0.1:", "10.0.0.1:http", ":5000", "h:65536", "h:1")
FILES = ("{", "[" * 100_000, '{"a": 1}', '["10.0.0.1:5000", 1]', "[[], [1]]", '[["10.0.0.1"], [1]]')


@pytest.mark.parametrize(
    ("environ", "text", "message"),
    [
        ({"MLX_HOSTFILE": "HERE"}, HOSTS, "'ring' needs MLX_RANK in the environment"),
        (RING | {"MLX_RANK": "one"}, HOSTS, "'one'"),
        (RING | {"MLX_RANK": "-1"}, HOSTS, "rank -1 of 3"),
        (RING | {"MLX_RANK": "3"}, HOSTS, "rank 3 of 3"),
        (RING | {"MLX_HOSTFILE": "/nowhere.json"}, "", "No such file"),
        (JACCL | {"MLX_JACCL_COORDINATOR": "here"}, DEVICES, "address is 'here'"),
        ({"MLX_IBV_DEVICES": "HERE", "MLX_RANK": "0"}, DEVICES, "needs MLX_JACCL_COORDINATOR"),
        ({"MLX_WORLD_SIZE": "2", "MLX_RANK": "0"}, "", "'nccl' needs NCCL_HOST_IP"),
        (MPI, "", "MPI needs KVANT_GUARD=HOST:PORT"),
        ({"PMI_RANK": "0", "PMI_SIZE": "two"}, "", "'two'"),
        *((FIRST | {"KVANT_GUARD": guard}, HOSTS, "expected HOST:PORT") for guard in GUARDS),
        *((FIRST, text, "variables for MLX's back end 'ring'") for text in FILES),
    ],
)
def test_what_is_refused(tmp_path: Path, environ: dict[str, str], text: str, message: str) -> None:
    with pytest.raises(RanksError, match=message):
        find(environ, tmp_path, text)
