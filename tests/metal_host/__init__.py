"""Runs Metal kernels on a Linux machine, for tests: see docs/host-run.md."""

from metal_host.errors import HostError
from metal_host.run import FORWARD, REVERSE, HostKernel, on_host, run_on_host, worker
from metal_host.source import KernelCall, kernel_call, traced

__all__ = [
    "FORWARD",
    "REVERSE",
    "HostError",
    "HostKernel",
    "KernelCall",
    "kernel_call",
    "on_host",
    "run_on_host",
    "traced",
    "worker",
]
