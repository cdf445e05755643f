"""The memory plan: what a model takes, and what a machine has, before a weight is read or downloaded.

from kvant.tools.plan import Checkpoint, plan, this_machine
needed = plan(Checkpoint.from_folder(folder), max_kv_size=4096)
print(needed.total, this_machine().limit_bytes)
"""

from kvant.tools.plan.checkpoint import Checkpoint
from kvant.tools.plan.machine import Machine, machine_with, this_machine
from kvant.tools.plan.plan import LongestContext, MemoryPlan, Settings, longest_context, plan, split_pairs

__all__ = [
    "Checkpoint",
    "LongestContext",
    "Machine",
    "MemoryPlan",
    "Settings",
    "longest_context",
    "machine_with",
    "plan",
    "split_pairs",
    "this_machine",
]
