"""The memory plan: what a model takes, and what a machine has, before a weight is read or downloaded.

from kvant.tools.plan import plan, read_folder
print(plan(read_folder(folder), max_kv_size=4096).total)
"""

from kvant.tools.plan.bridged import BridgedCheckpoint, read_facts, read_folder
from kvant.tools.plan.memory import AnyCheckpoint, DraftModel, MemoryPlan, Settings
from kvant.tools.plan.plan import LongestContext, longest_context, plan, split_pairs
from kvant.tools.plan.ranks import Parallel, RankPlan, RankPlanner
from kvant.tools.plan.stored import Checkpoint

__all__ = [
    "AnyCheckpoint",
    "BridgedCheckpoint",
    "Checkpoint",
    "DraftModel",
    "LongestContext",
    "MemoryPlan",
    "Parallel",
    "RankPlan",
    "RankPlanner",
    "Settings",
    "longest_context",
    "plan",
    "read_facts",
    "read_folder",
    "split_pairs",
]
