"""The record of where the fused kernel was tried: a small file in the user's cache, for all processes.

It belongs to this user alone. What others may write, what is cut and what is of another device, system, MLX
or text of the kernel counts for nothing. Of two processes that write it at once, one is lost, and its trial
is made again.
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
MAX_BYTES = 2**21  # more than all of these take
MOST_DEVICES = 8  # the last ones are kept
MOST_USES = 64  # of a device; the last ones are kept
MOST_TEXT = 400  # characters of a reason
# Of an error's text: memory was short, which says nothing of the kernel.
SHORT_MEMORY = ("malloc", "out of memory", "OutOfMemory", "Insufficient Memory")

Findings = dict[str, str]  # by the name of a use
_name = cache(repr)


def found(use: KernelUse, backend: Backend) -> str | None:
    """What is recorded of this use: ``RIGHT``, or why not. None: nothing is."""
    return _findings(backend).get(_name(use))


def keep(findings: Mapping[KernelUse, str], backend: Backend, *, anew: bool = False) -> None:
    """Record findings; this process has them also if the file cannot be written.

    Args:
        findings: ``RIGHT``, or why not.
        anew: in place of all that is recorded of this device.
    """
    own = _findings(backend)
    everything = _read()
    recorded = everything.pop(device_key(backend), {})
    for known in (own, recorded) if anew else ():
        known.clear()
    for use, text in findings.items():
        name = _name(use)
        text = text[:MOST_TEXT]
        if any(word in text for word in SHORT_MEMORY):
            own.setdefault(name, text)  # of a trial: this process makes none again
            continue
        own[name] = text
        recorded.pop(name, None)  # the last one is the newest
        recorded[name] = text
    everything[device_key(backend)] = dict([*recorded.items()][-MOST_USES:])
    write_record(path(), dict([*everything.items()][-MOST_DEVICES:]))


def describe(backend: Backend) -> str:
    """The record's file, and what it holds of this device."""
    recorded = _read().get(device_key(backend), {})
    right = sum(text == RIGHT for text in recorded.values())
    return f"{path()}: {right} formats right on this device, {len(recorded) - right} not"


def path() -> Path:
    """The record's file."""
    return user_cache() / FILE


@cache
def device_key(backend: Backend) -> str:
    """What findings hold for: the device, the system, MLX's version, and a digest of the kernel and its
    launches.
    """
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
    """This process's findings of its device, which begin with the file's."""
    return _read().get(device_key(backend), {})


def _read() -> dict[str, Findings]:
    """The file, by :func:`device_key`; empty if there is none that counts."""
    read = read_record(path(), MAX_BYTES)
    devices = read.items() if isinstance(read, dict) else ()
    return {
        key: own
        for key, own in devices
        if isinstance(own, dict) and all(isinstance(x, str) for x in own.values())
    }
