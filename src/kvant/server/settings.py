"""What a server is started with: the model, its memory, where it listens, and what it grants."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from kvant.cache.options import DEFAULT_OPTIONS, CacheOptions
from kvant.engine.drafts import ServedSource
from kvant.engine.load import POCKET
from kvant.errors import ArgumentError

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")  # as a Host header has them
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s@]+", re.IGNORECASE)  # scheme://host[:port], without a path
MAX_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what a client may send or hold. Times are seconds.

    Attributes:
        body_bytes: of a request's body.
        all_bodies_bytes: of all bodies that are being read or answered; beyond them a request gets 503.
        header_bytes: of a request's line and headers that come in pieces.
        connections: at once; one more is answered with 503.
        header_s: from the first byte of a request, or from the connection's start, to the end of its headers.
        idle_s: that a connection may wait for its next request.
        body_s: for the whole body.
        write_s: that a client may not read what is written to it.
        drain_s: that requests under way may go on after the first signal.
        stall_s: without a sign of life of the engine, after which it counts as failed.
    """

    body_bytes: int = 8 << 20
    all_bodies_bytes: int = 32 << 20
    header_bytes: int = 64 << 10
    connections: int = 1000
    header_s: float = 10.0
    idle_s: float = 30.0
    body_s: float = 60.0
    write_s: float = 60.0
    drain_s: float = 30.0
    stall_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked settings of a server.

    Attributes:
        model: as for :func:`kvant.engine.load.find_model`.
        aliases: further names of the model, or patterns of names.
        host: an address or name to listen on.
        port: 0: any that is free.
        sequences: answers at once.
        max_kv_size: tokens of one sequence; None: the smaller of 4096 and the model's context.
        cache, prefill_step_size: of the pool.
        deterministic: an answer does not depend on those beside it.
        draft: what answers draft from, where a request says nothing: "none", "prompt"; "model" needs a draft model.
        max_queue: requests that may wait.
        strict: a field of a request that is not known, or cannot be heeded, is refused; else it is left out, and said.
        template_variables: for the chat template of every conversation; a request's own go before them.
        api_keys: one of which a client has to have; none: any will do.
        allow_origins: web pages of these origins may use the server.
        limits: bounds of what a client may send or hold.
    """

    model: str = POCKET
    aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8080
    sequences: int = 4
    max_kv_size: int | None = None
    cache: CacheOptions = DEFAULT_OPTIONS
    prefill_step_size: int = 512
    deterministic: bool = False
    draft: ServedSource = "none"
    max_queue: int = 64
    strict: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allow_origins: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ArgumentError("port", f"is {self.port}; expected 0 to 65535")
        if not self.host or not self.host.isprintable() or any(c in self.host for c in " /@"):
            raise ArgumentError("host", f"is {self.host[:80]!r}; expected an address or a name, such as 127.0.0.1")
        for name, most in (("sequences", MAX_SEQUENCES), ("max_queue", 100_000)):
            if not 1 <= getattr(self, name) <= most:
                raise ArgumentError(name, f"is {getattr(self, name)}; expected 1 to {most}")
        if not (self.is_loopback or self.api_keys):
            raise ArgumentError(
                "host", f"is {self.host}, which other machines reach; it is refused without", needs="api_key_file"
            )
        for alias in self.aliases:
            if not alias.strip() or not alias.isprintable() or len(alias) > 200:
                raise ArgumentError("alias", f"is {alias[:80]!r}; expected a name")
        for origin in self.allow_origins:
            if not ORIGIN.fullmatch(origin):
                raise ArgumentError(
                    "allow_origin", f"is {origin[:80]!r}; expected scheme://host[:port], without * or a path"
                )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the server."""
        if self.host.lower() == "localhost":
            return True
        try:
            return ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    @property
    def key_digests(self) -> tuple[bytes, ...]:
        """SHA-256 of each key."""
        return tuple(hashlib.sha256(key.encode()).digest() for key in self.api_keys)
