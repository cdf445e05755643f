"""A rank's place among the others, from what a launcher writes into the environment."""

import json
from pathlib import Path

import pytest

from kvant.errors import RanksError
from kvant.ranks.environment import Place, find_place

RING = [["10.0.0.1:32323", "10.0.1.1:32324"], ["10.0.0.2:32325"], ["10.0.0.3:32326"]]
DEVICES = [[None, "rdma_en2"], ["rdma_en2", None]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "hosts.json"


def test_no_launcher() -> None:
    assert find_place({}) is None
    assert find_place({"KVANT_GUARD": "10.0.0.1:5000", "PATH": "/bin"}) is None


def test_ring(file: Path) -> None:
    file.write_text(json.dumps(RING))
    environ = {"MLX_HOSTFILE": str(file), "MLX_RANK": "2"}
    assert find_place(environ) == Place(2, 3, "ring", "10.0.0.1", 32322)
    assert find_place({**environ, "KVANT_GUARD": "mini.local:7000"}) == Place(2, 3, "ring", "mini.local", 7000)
    assert find_place({**environ, "KVANT_GUARD": "[fe80::1%en0]:7000"}) == Place(2, 3, "ring", "fe80::1%en0", 7000)


@pytest.mark.parametrize("text", ["", "\n", "[]", '[["10.0.0.1:5000"]]'])
def test_a_ring_of_one(file: Path, text: str) -> None:
    file.write_text(text)
    assert find_place({"MLX_HOSTFILE": str(file), "MLX_RANK": "0"}) is None


def test_jaccl(file: Path) -> None:
    file.write_text(json.dumps(DEVICES))
    environ = {"MLX_IBV_DEVICES": str(file), "MLX_JACCL_COORDINATOR": "10.0.0.1:32323", "MLX_RANK": "1"}
    assert find_place(environ) == Place(1, 2, "jaccl", "10.0.0.1", 32322)
    for name in environ:
        with pytest.raises(RanksError, match=f"back end 'jaccl' needs {name} in the environment"):
            find_place({key: value for key, value in environ.items() if key != name} | {"MLX_JACCL_RING": "1"})


def test_nccl() -> None:
    environ = {"NCCL_HOST_IP": "10.0.0.1", "NCCL_PORT": "12345", "MLX_WORLD_SIZE": "4", "MLX_RANK": "3"}
    assert find_place(environ) == Place(3, 4, "nccl", "10.0.0.1", 12344)
    assert find_place({**environ, "NCCL_HOST_IP": "fd00::1"}) == Place(3, 4, "nccl", "fd00::1", 12344)
    assert find_place({**environ, "MLX_WORLD_SIZE": "1", "MLX_RANK": "0"}) is None
    for name in ("NCCL_HOST_IP", "NCCL_PORT", "MLX_RANK"):
        with pytest.raises(RanksError, match=f"back end 'nccl' needs {name} in the environment"):
            find_place({key: value for key, value in environ.items() if key != name})


@pytest.mark.parametrize("names", [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")])
def test_mpi(names: tuple[str, str]) -> None:
    environ = dict(zip(names, ("1", "2"), strict=True))
    guard = {"KVANT_GUARD": "10.0.0.1:5000"}
    assert find_place({**environ, **guard}) == Place(1, 2, "mpi", "10.0.0.1", 5000)
    with pytest.raises(RanksError, match="MPI does not say where rank 0 is; expected KVANT_GUARD=HOST:PORT"):
        find_place(environ)
    assert find_place(dict(zip(names, ("0", "1"), strict=True))) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"MLX_RANK": "1"}, "MLX_RANK is set, but none of MLX_HOSTFILE"),
        ({"MLX_HOSTFILE": "HERE"}, "back end 'ring' needs MLX_RANK in the environment, which is not set"),
        ({"MLX_HOSTFILE": "HERE", "MLX_RANK": ""}, "back end 'ring' needs MLX_RANK"),
        ({"MLX_HOSTFILE": "HERE", "MLX_RANK": "one"}, "MLX_RANK is 'one'; expected a whole number"),
        ({"MLX_HOSTFILE": "HERE", "MLX_RANK": "-1"}, "MLX_RANK is '-1'; expected a whole number"),
        ({"MLX_HOSTFILE": "HERE", "MLX_RANK": "3"}, "MLX_RANK is 3; expected 0 to 2, for there are 3 ranks"),
        ({"MLX_HOSTFILE": "/nowhere.json", "MLX_RANK": "0"}, "/nowhere.json cannot be read: No such file"),
        ({"PMI_RANK": "0", "PMI_SIZE": "two"}, "PMI_SIZE is 'two'; expected a whole number"),
    ],
)
def test_refused(file: Path, environ: dict[str, str], message: str) -> None:
    file.write_text(json.dumps(RING))
    with pytest.raises(RanksError, match=message):
        find_place({name: value.replace("HERE", str(file)) for name, value in environ.items()})


@pytest.mark.parametrize("guard", ["5000", "10.0.0.1", "10.0.0.1:", "10.0.0.1:http", ":5000", "h:65536", "h:1", ""])
def test_a_wrong_address(file: Path, guard: str) -> None:
    file.write_text(json.dumps(RING))
    with pytest.raises(RanksError, match=r"KVANT_GUARD: the address is .*; expected HOST:PORT"):
        find_place({"MLX_HOSTFILE": str(file), "MLX_RANK": "0", "KVANT_GUARD": guard})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ('{"a": 1}', "expected a JSON list"),
        ('["10.0.0.1:5000"]', 'expected \\[\\["IP:PORT", ...\\], ...\\], a list for each rank'),
        ('[[], ["10.0.0.1:5000"]]', 'expected \\[\\["IP:PORT", ...\\], ...\\], a list for each rank'),
        ('[["10.0.0.1"], ["10.0.0.2"]]', "the address is '10.0.0.1'; expected HOST:PORT"),
    ],
)
def test_a_wrong_host_file(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(RanksError, match=f"MLX_HOSTFILE .*{message}"):
        find_place({"MLX_HOSTFILE": str(file), "MLX_RANK": "0"})
