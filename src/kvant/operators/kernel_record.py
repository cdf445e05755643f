"""The record of where the fused kernel was tried: a small file in the user's cache, for all processes.

A record that other users may write to, that is truncated, or that is for another device, system, MLX version
or kernel source is ignored. If two processes write at once, one update is lost and its trial runs again.
"""

import hashlib
import os
from collections.abc import Mapping
from functools import cache
from importlib import resources
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from kvant.files import user_cache
from kvant.operators.kernels.launch import Backend
from kvant.operators.probe import KernelUse
from kvant.private import read_record, write_record

FILE = "kernels.json"
RIGHT = "right"
MAX_BYTES = 2**21  # more than a full record takes
MOST_DEVICES = 8  # older ones are dropped
MOST_USES = 64  # per device; older ones are dropped
MOST_TEXT = 400  # characters of a reason
# Errors with these words mean that memory ran out, which says nothing about the kernel.
SHORT_MEMORY = ("malloc", "out of memory", "OutOfMemory", "Insufficient Memory")

Findings = dict[str, str]  # by the name of a use
_name = cache(repr)


def lookup(use: KernelUse, backend: Backend) -> str | None:
    """Return the recorded finding for a use, ``RIGHT`` or the defect, or None if there is none."""
    return _findings(backend).get(_name(use))


def keep(findings: Mapping[KernelUse, str], backend: Backend, *, anew: bool = False) -> None:
    """Record findings. This process remembers them even if the file cannot be written.

    Args:
        findings: ``RIGHT`` or the defect, by use.
        anew: replace everything recorded for this device.
    """
    findings_here = _findings(backend)
    everything = _read()
    recorded = everything.pop(device_key(backend), {})
    for known in (findings_here, recorded) if anew else ():
        known.clear()
    for use, text in findings.items():
        name = _name(use)
        text = text[:MOST_TEXT]
        if any(word in text for word in SHORT_MEMORY):
            findings_here.setdefault(name, text)  # only in memory, so that this process does not retry
            continue
        findings_here[name] = text
        recorded.pop(name, None)  # the newest comes last
        recorded[name] = text
    everything[device_key(backend)] = dict([*recorded.items()][-MOST_USES:])
    write_record(path(), dict([*everything.items()][-MOST_DEVICES:]))


def describe(backend: Backend) -> str:
    """Return a line with the record's path and its counts for this device."""
    recorded = _read().get(device_key(backend), {})
    right = sum(text == RIGHT for text in recorded.values())
    return f"{path()}: {right} formats right on this device, {len(recorded) - right} not"


def path() -> Path:
    """Return the path of the record."""
    return user_cache() / FILE


@cache
def device_key(backend: Backend) -> str:
    """Return what findings depend on: device, system, MLX version, and a digest of the kernel sources."""
    digest = hashlib.sha256(backend.encode())
    for file in sorted(resources.files("kvant.operators.kernels").iterdir(), key=lambda file: file.name):
        if file.name.endswith((".h", ".py")):
            digest.update(file.read_bytes())
    device = mx.device_info()
    system = os.uname()
    named = [
        device.get("device_name"),
        device.get("architecture"),
        system.sysname,
        system.release,
        system.version,
    ]
    return ", ".join([*map(str, named), f"mlx {version('mlx')}", f"kernel {digest.hexdigest()[:16]}"])


@cache
def _findings(backend: Backend) -> Findings:
    """Return this process's findings for its device, initially those of the file."""
    return _read().get(device_key(backend), {})


def _read() -> dict[str, Findings]:
    """Return the file's findings by :func:`device_key`; empty without a valid file."""
    read = read_record(path(), MAX_BYTES)
    devices = read.items() if isinstance(read, dict) else ()
    return {
        key: findings
        for key, findings in devices
        if isinstance(findings, dict) and all(isinstance(x, str) for x in findings.values())
    }
