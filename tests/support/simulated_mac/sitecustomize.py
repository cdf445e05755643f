"""A Mac as Python shows it, simulated on Linux. PYTHONPATH names this folder, so children of a process have
it too.

Linux is what MLX, other libraries' Rust and C, programs such as ps, and Python with -I see of the system.
Each process adds its command to the file that SIMULATED_MAC names.
"""

import asyncio  # noqa: F401  # each of these chooses by the system when it is imported
import builtins
import ctypes
import errno
import io
import multiprocessing  # noqa: F401
import os
import platform
import resource
import shutil  # noqa: F401
import socket  # noqa: F401
import subprocess  # noqa: F401
import sys
import sysconfig
import urllib.request  # noqa: F401
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import truststore  # noqa: F401  # of httpx2; on a Mac it asks Apple's Security library

HOME = os.environ["HOME"]
LINUX_ONLY = """
    copy_file_range eventfd eventfd_read eventfd_write fdatasync getrandom getxattr listxattr memfd_create pidfd_open
    pipe2 posix_fadvise posix_fallocate removexattr sched_getaffinity sched_setaffinity setxattr splice
    O_DIRECT O_PATH
"""
OPEN_MAX = 10_240  # files that one process may have, at most
HIDDEN = ("/proc/", "/sys/fs/cgroup/")
ONE_PATH = (
    "access chdir chmod listdir lstat mkdir open readlink remove rmdir scandir stat truncate unlink utime"
)
TWO_PATHS = "link rename replace symlink"

lstat, listdir, open_file = os.lstat, os.listdir, open
setrlimit, getrlimit = resource.setrlimit, resource.getrlimit


def _place(path: Any) -> Any:
    """The path as the file system takes it: capital letters do not count in the user's folders, and /proc
    is absent.
    """
    text = path if isinstance(path, int | bytes) or path is None else os.fspath(path)
    if not isinstance(text, str):
        return path
    if any(f"{os.path.normpath(text)}/".startswith(hidden) for hidden in HIDDEN):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
    whole = os.path.join(os.getcwd(), text)
    if not whole.startswith(f"{HOME}/"):
        return path
    found = HOME
    for part in whole.removeprefix(f"{HOME}/").split("/"):
        try:
            lstat(f"{found}/{part}")
        except OSError:
            with suppress(OSError):
                part = next((name for name in listdir(found) if name.casefold() == part.casefold()), part)
        found = f"{found}/{part}"
    return found


def _placing(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    @wraps(function)
    def call(*paths: Any, **options: Any) -> Any:
        if any(name.endswith("dir_fd") and value is not None for name, value in options.items()):
            return function(*paths, **options)
        return function(*map(_place, paths[:count]), *paths[count:], **options)

    for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if function in known:
            known.add(call)
    return call


def _setrlimit(what: int, limits: tuple[int, int]) -> None:
    too_many = what == resource.RLIMIT_NOFILE and not 0 <= limits[0] <= OPEN_MAX
    if too_many or what in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        raise ValueError("current limit exceeds maximum limit")
    if what == resource.RLIMIT_NOFILE:
        limits = limits[0], getrlimit(what)[1]
    setrlimit(what, limits)


def _getrlimit(what: int) -> tuple[int, int]:
    """The hard limit of open files is none on a Mac."""
    soft, hard = getrlimit(what)
    return soft, resource.RLIM_INFINITY if what == resource.RLIMIT_NOFILE else hard


class _Library(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name == "prctl":
            raise AttributeError("dlsym(RTLD_DEFAULT, prctl): symbol not found")
        return super().__getattr__(name)


sysconfig.get_config_vars()  # read from a file with the system's name
resource.setrlimit, resource.getrlimit = _setrlimit, _getrlimit
ctypes.CDLL = _Library
for linux in LINUX_ONLY.split():
    if hasattr(os, linux):
        delattr(os, linux)
os.process_cpu_count = os.cpu_count  # of Python 3.13; on Linux it asks for the affinity
for names, paths in ((ONE_PATH, 1), (TWO_PATHS, 2)):
    for each in names.split():
        setattr(os, each, _placing(getattr(os, each), paths))
builtins.open = io.open = _placing(open_file, 1)
uname = os.uname_result(("Darwin", os.uname().nodename, "24.5.0", "Darwin Kernel Version 24.5.0", "arm64"))
os.uname, platform._uname_cache = lambda: uname, None
platform.mac_ver = lambda *_: ("15.5", ("", "", ""), "arm64")
sys.platform = "darwin"
with open_file(os.environ["SIMULATED_MAC"], "a") as processes:
    processes.write(" ".join(sys.orig_argv) + "\n")
