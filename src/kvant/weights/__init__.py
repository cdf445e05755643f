"""Models by name or repository: known, pulled from the hub, verified.

weights.toml names models, each pinned to a commit with sizes and digests. Any other repository on the hub is
pinned to the commit it resolves to when it is first pulled, and its digests are recorded in a lock in the
user's cache. The files are in huggingface_hub's cache, shared with mlx-lm; kvant loads nothing from it
unverified.
"""

from kvant.weights.known import known_models
from kvant.weights.local import Pulled, find, pulled, removal, verify
from kvant.weights.pull import pull, remote_facts
from kvant.weights.reference import parse_reference

__all__ = [
    "Pulled",
    "find",
    "known_models",
    "parse_reference",
    "pull",
    "pulled",
    "remote_facts",
    "removal",
    "verify",
]
