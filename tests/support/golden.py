"""Recorded checkpoints, and the logits transformers computed from them (scripts/golden.py)."""

import json
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
_RECORDED = json.loads((GOLDEN / "cases.json").read_text())
IDS: list[int] = _RECORDED["ids"]
CASES: dict[str, str] = _RECORDED["weights"]
