"""The memory plan: whether a model fits a machine, before any weight is read or downloaded.

from kvant.plan import plan, read_folder
print(plan(read_folder(folder), max_kv_size=4096).total)
"""

from kvant.plan.bridged import BridgedCheckpoint, read_facts, read_folder
from kvant.plan.memory import AnyCheckpoint, DraftModel, MemoryPlan, Settings
from kvant.plan.planner import LongestContext, longest_context, plan, split_pairs
from kvant.plan.ranks import Parallel, RankPlan, RankPlanner
from kvant.plan.stored import Checkpoint

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
