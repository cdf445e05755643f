"""The settings of a server: model, memory, address, access and limits."""

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from kvant.cache.options import DEFAULT_OPTIONS, CacheOptions
from kvant.engine.drafts import ServedSource
from kvant.engine.load import POCKET
from kvant.errors import ArgumentError
from kvant.text.pooling import PoolingKind

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")  # as a Host header has them
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s@]+", re.IGNORECASE)  # scheme://host[:port], without a path
MAX_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on what clients may send and occupy. Times are in seconds."""

    body_bytes: int = 8 << 20  # of a request's body
    # of all bodies until their prompts are accepted; further requests get 503
    all_bodies_bytes: int = 32 << 20
    header_bytes: int = 64 << 10  # of an incomplete request line with headers
    connections: int = 1000  # at once; further ones get 503
    # from a request's first byte, or the connection's start, to the end of its headers
    header_s: float = 10.0
    idle_s: float = 30.0  # between two requests on a connection
    body_s: float = 60.0  # for the whole body
    slow_s: float = 2.0  # a slower body is dropped if others need its room
    write_s: float = 60.0  # without the client reading what is written
    drain_s: float = 30.0  # for open requests after the first signal
    stall_s: float = 120.0  # without progress of the engine, before it counts as failed
    # minimum time that a model stays loaded before it may make room for another
    stay_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked settings of a server."""

    model: str = POCKET  # as for :func:`kvant.engine.load.find_model`
    aliases: tuple[str, ...] = ()  # additional names of the model, or patterns
    host: str = "127.0.0.1"  # an address or name to listen on
    port: int = 8080  # 0: any that is free
    sequences: int = 4  # answers at once
    # tokens of one sequence; None: the smaller of 4096 and the model's context
    max_kv_size: int | None = None
    cache: CacheOptions = DEFAULT_OPTIONS
    prefill_step_size: int = 512
    deterministic: bool = False  # an answer does not depend on other answers in its batch
    # default source of drafts; "model" needs a draft model
    draft: ServedSource = "none"
    max_queue: int = 64  # requests that may wait
    # refuse unknown and unsupported fields; else ignore and report them
    strict: bool = False
    # For the chat template of every conversation; a request's variables override them.
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    # how hidden states become a vector; None: as the model's sentence-transformers files say
    pooling: PoolingKind | None = None
    # a client must send one of them; empty: no key is needed
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allow_origins: tuple[str, ...] = ()  # web pages of these origins may use the server
    limits: Limits = field(default_factory=Limits)
    keep_alive_s: float = math.inf  # seconds after which an idle model is unloaded
    # sent by `kvant ps` and `kvant stop`, which read it from a file of this user's running servers
    control_token: str = field(default_factory=secrets.token_urlsafe, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ArgumentError("port", f"is {self.port}; expected 0 to 65535")
        if not self.host or not self.host.isprintable() or any(c in self.host for c in " /@"):
            raise ArgumentError(
                "host", f"is {self.host[:80]!r}; expected an address or a name, such as 127.0.0.1"
            )
        for name, most in (("sequences", MAX_SEQUENCES), ("max_queue", 100_000)):
            if not 1 <= getattr(self, name) <= most:
                raise ArgumentError(name, f"is {getattr(self, name)}; expected 1 to {most}")
        if not (self.is_loopback or self.api_keys):
            raise ArgumentError(
                "host",
                f"is {self.host}, which other machines reach; it is refused without",
                needs="api_key_file",
            )
        if not self.keep_alive_s >= 0:
            raise ArgumentError("keep_alive", f"is {self.keep_alive_s}; expected 0 or more seconds")
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
        address = address_of(self.host)
        return self.host.lower() == "localhost" if address is None else address.is_loopback


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address of a host, or None if it is a name."""
    try:
        return ip_address(host.strip("[]"))
    except ValueError:
        return None
