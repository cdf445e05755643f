"""What ranks are started with: as MLX's own launcher has it."""

import argparse
import gc
import json
import os
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from mlx._distributed_utils import common as mlx_common
from mlx._distributed_utils import launch as mlx_launch

from kvant.errors import RanksError
from kvant.ranks.hosts import Host, count_ports, is_here, local_hosts, make_group, rank_commands, read_hosts

RDMA = [[None, "rdma_en2", "rdma_en3"], ["rdma_en2", None, "rdma_en4"], ["rdma_en3", "rdma_en4", None]]
HOSTS = [Host(rank, f"mac{rank}", [f"10.9.8.{rank + 1}", f"10.9.7.{rank + 1}"], RDMA[rank]) for rank in range(3)]
PORTS = range(32322, 32322 + count_ports(HOSTS))


def _mlx_variables(hosts: Sequence[Host], backend: str) -> list[tuple[dict[str, str], dict[str, str]]]:
    """The files and variables that mlx.launch gives each rank."""
    found: list[Any] = []
    arguments = argparse.Namespace(
        starting_port=32323, nccl_port=32323, connections_per_ip=1, env=[], cwd=None, python=None, verbose=False,
        backend=backend, repeat_hosts=1,
    )  # fmt: skip
    with patch.object(mlx_launch, "_launch_with_io", lambda kind, ranks, verbose: found.extend(ranks)):
        way = getattr(mlx_launch, f"launch_{backend.removesuffix('-ring')}")
        theirs = [mlx_common.Host(host.rank, host.name, list(host.ips), list(host.rdma)) for host in hosts]
        way(argparse.ArgumentParser(), theirs, arguments, ["true"])
    result = []
    for (rank, _, _, _, files, env, _), _ in found:
        result.append((files, dict(text.split("=", 1) for text in env) | {"MLX_RANK": str(rank)}))
    return result


@pytest.mark.parametrize("backend", ["ring", "jaccl", "jaccl-ring", "nccl"])
def test_variables_are_those_of_mlx_launch(backend: str) -> None:
    group = make_group(HOSTS, backend, PORTS)
    own = [({**group.variables, **each}) for each in group.own]
    ours = {"KVANT_GUARD": "10.9.8.1:32322", "KVANT_LAUNCH": "1"}
    assert [{name: each.pop(name) for name in ours} for each in own] == [ours] * 3
    assert [(dict(group.files), each) for each in own] == _mlx_variables(HOSTS, backend)


def test_ranks_of_one_machine() -> None:
    group = make_group(local_hosts(2).hosts, "ring", [9, 11, 13])
    assert json.loads(group.files["MLX_HOSTFILE"]) == [["127.0.0.1:11"], ["127.0.0.1:13"]]
    assert group.variables["KVANT_GUARD"] == "127.0.0.1:9"
    assert [each["CUDA_VISIBLE_DEVICES"] for each in make_group(local_hosts(2).hosts, "nccl", [9, 11]).own] == [
        "0",
        "1",
    ]
    alone = make_group(local_hosts(1).hosts, "ring", [9, 11])
    assert (alone.files, alone.variables, alone.own) == ({}, {}, [{}])


@pytest.mark.parametrize(
    ("backend", "rank", "change", "message"),
    [
        ("ring", 1, {"ips": []}, "rank 1, mac1, has no ips; the ring needs one of each rank"),
        ("jaccl", 0, {"ips": []}, "rank 0, mac0, has no ips; the other ranks need one to reach it"),
        ("nccl", 0, {"ips": []}, "rank 0, mac0, has no ips"),
        ("jaccl", 2, {"rdma": []}, "rank 2, mac2: rdma is .*; expected 3 devices, null for the rank itself"),
        ("jaccl", 1, {"rdma": ["a", "b", "c"]}, "rank 1, mac1: rdma is"),
        ("jaccl", 1, {"rdma": ["a", None, None]}, "rank 1, mac1, has no RDMA device for rank 2"),
    ],
)
def test_a_host_that_lacks_something(backend: str, rank: int, change: Mapping[str, Any], message: str) -> None:
    hosts = [replace(host, **change) if host.rank == rank else host for host in HOSTS]
    with pytest.raises(RanksError, match=message):
        make_group(hosts, backend, PORTS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: .*No such file"),
        ("{", "cannot be read: Expecting"),
        ("[]", "has no list of hosts"),
        ('{"backend": "ring"}', "has no list of hosts"),
        ("3", "has no list of hosts"),
        ('[{"ips": []}]', "rank 0: ssh is None; expected a host's name"),
        ('[{"ssh": "-oProxyCommand=x"}]', "rank 0: ssh is '-oProxyCommand=x'; expected a host's name"),
        ('[{"ssh": "a"}, {"ssh": 3}]', "rank 1: ssh is 3; expected a host's name"),
        ('[{"ssh": "a", "ips": "10.0.0.1"}]', "rank 0: expected ips and rdma as lists"),
        ('{"hosts": [{"ssh": "a"}], "envs": [1]}', "expected backend as a string, envs as a list of strings"),
    ],
)
def test_a_host_file_that_is_none(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "hosts.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RanksError, match=message):
        read_hosts(path)


@pytest.mark.filterwarnings("ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning")  # MLX's
def test_a_host_file_is_read_as_mlx_reads_it(tmp_path: Path) -> None:
    listed = [{"ssh": host.name, "ips": host.ips, "rdma": host.rdma} for host in HOSTS]
    path = tmp_path / "hosts.json"
    for raw in ({"backend": "jaccl", "envs": ["A=1"], "hosts": listed}, listed, [{"ssh": "mac0"}]):
        path.write_text(json.dumps(raw))
        found, theirs = read_hosts(path), mlx_common.Hostfile.from_file(path)
        assert (found.backend, list(found.envs)) == (theirs.backend, theirs.envs)
        assert [(h.rank, h.name, h.ips, h.rdma) for h in found.hosts] == [
            (h.rank, h.ssh_hostname, h.ips, h.rdma) for h in theirs.hosts
        ]
    gc.collect()


def test_which_host_is_this_machine() -> None:
    for name, ips in (("localhost", []), ("127.0.0.1", []), (socket.gethostname(), []), ("mac1", ["127.0.0.9"])):
        assert is_here(Host(0, name, ips)), name
    for name, ips in (("mac1", []), ("192.0.2.1", []), ("mac1", ["192.0.2.1"]), ("nobody-else@localhost", [])):
        assert not is_here(Host(0, name, ips)), name  # 192.0.2.0/24 is nobody's


def test_a_rank_elsewhere_gets_the_same_by_ssh(tmp_path: Path) -> None:
    """The command that ssh is given does, in a shell, what a child of this process is started with."""
    words = ["printenv", "MLX_RANK", "MLX_RING_VERBOSE", "KVANT_GUARD", "TEXT", "MLX_HOSTFILE"]
    hosts = [Host(0, "localhost", ["127.0.0.1"]), Host(1, "mac1", ["192.0.2.1"])]
    group = make_group(hosts, "ring", [9, 11, 13])
    text = 'it\'s "$HOME" & more; `x`'
    here, there = rank_commands(
        hosts, group, words, {"TEXT": text, "MLX_RING_VERBOSE": "1"}, cwd=None, folder=tmp_path, terminal=False
    )
    assert (here.host, here.words, here.cwd) == ("", words, None)
    assert here.environment is not None
    assert (here.environment["TEXT"], here.environment["MLX_RANK"]) == (text, "0")
    assert Path(here.environment["MLX_HOSTFILE"]).read_text() == group.files["MLX_HOSTFILE"]
    *ssh, name, script = there.words
    assert (ssh[0], ssh[-2:], name) == ("ssh", ["-tt", "--"], "mac1")
    found = subprocess.run(["bash", "-c", script], env={"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)},
                           capture_output=True, text=True)  # fmt: skip
    *lines, file = found.stdout.splitlines()
    assert (lines, found.stderr) == (["1", "1", "127.0.0.1:9", text], "")
    assert Path(file).read_text() == group.files["MLX_HOSTFILE"]


def test_where_a_rank_elsewhere_runs(tmp_path: Path) -> None:
    def script(cwd: str | None) -> str:
        group = make_group([HOSTS[0]], "ring", PORTS)
        (command,) = rank_commands(HOSTS[:1], group, ["pwd"], {}, cwd=cwd, folder=tmp_path, terminal=False)
        assert command.words[-4] == "-T"  # rank 0's pipes stay as they are
        return command.words[-1]

    def run(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", "-c", text], capture_output=True, text=True, cwd="/")

    assert run(script(str(tmp_path))).stdout == f"{tmp_path}\n"
    assert run(script(None)).stdout == f"{os.getcwd()}\n"
    missing = run(script("/no such folder"))
    assert (missing.returncode, missing.stdout) == (126, "")
    assert "no such folder" in missing.stderr
    elsewhere = script(None).replace(shlex.quote(os.getcwd()), "/none")
    assert run(elsewhere).stdout == "/\n"


def test_variables_of_another_group_are_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLX_HOSTFILE", "MLX_RANK", "MLX_IBV_DEVICES", "MLX_WORLD_SIZE", "KVANT_GUARD"):
        monkeypatch.setenv(name, "7")
    hosts = local_hosts(1).hosts
    (command,) = rank_commands(
        hosts, make_group(hosts, "ring", [1, 2]), ["true"], {}, cwd=None, folder=tmp_path, terminal=True
    )
    assert command.environment is not None
    assert not {name for name in command.environment if name.startswith(("MLX_", "KVANT_GUARD"))}
