"""Drafts of the embedded model's head beside drafts from the text, on held-out conversations.

Run: python scripts/bench_heads.py [conversations] [texts]    (default: 60, 200)

Prints JSON. "drafts": each source answers the last question of the same conversations, greedily and by the
model's own sampling, through an 8-bit cache: steps a token (1 without drafts), the share of the drafted tokens
that were accepted, and the time divided by that without drafts, in turns. Every step drafts if it can: what a
scheduler switches off because it does not pay on this machine is not. "as chosen": as a user has it. "same":
texts that are those without drafts, alone and eight side by side, of the model's sampling.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import cycle, islice
from statistics import median
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)

from kvant.engine.drafts import DraftChoice, Drafter
from kvant.engine.load import POCKET
from kvant.machine import environment
from kvant.sample_utils import make_sampler
from kvant.tools.report.texts import heldout_documents

KINDS = ("story", "talk", "facts", "questions")
TOKENS = 150
SOURCES: dict[str, dict[str, Any]] = {
    "prompt": {"draft": "prompt"},
    **{f"mtp, {n}": {"draft": "mtp", "num_draft_tokens": n} for n in (1, 2, 3, 5, 7)},
}
SAMPLERS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temp": 0.7, "top_p": 0.95}}
CHOSEN = DraftChoice.count


def main() -> None:
    """Measure and print."""
    conversations = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    texts = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    model, tokenizer = kvant.load(POCKET, mtp=True)
    prompts = list(islice(cycle(_prompts(tokenizer)), max(conversations, texts)))
    record = {
        "machine": f"{environment().device}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "versions": environment().versions,
        "conversations": conversations,
        "drafts": {},
        "as chosen": {},
    }
    for choice, count in (("drafts", _always), ("as chosen", CHOSEN)):
        DraftChoice.count = count  # type: ignore[method-assign]
        for name, settings in SAMPLERS.items():
            found = _compared(model, tokenizer, prompts[:conversations], settings)
            record[choice][name] = found  # type: ignore[index]
    DraftChoice.count = _always  # type: ignore[method-assign]
    record["same"] = {f"{bits} bits": _same(model, tokenizer, prompts[:texts], bits) for bits in (0, 8, 4)}
    print(json.dumps(record, indent=1))


def _always(self: DraftChoice, drafter: Drafter, most: int, *, longer: int = 0) -> int:
    if not drafter.is_free:
        return most
    match = drafter.match + longer
    return min(match, most) if match >= 4 else 0


def _prompts(tokenizer: Any) -> list[list[int]]:
    """Of each conversation all before its last answer."""
    found = []
    for document in heldout_documents():
        messages = document.get("messages", [])
        asked = [number for number, message in enumerate(messages) if message["role"] == "user"]
        if document["kind"] in KINDS and asked:
            ids = tokenizer.apply_chat_template(messages[: asked[-1] + 1], add_generation_prompt=True)
            found.append(list(ids))
    return found


def _compared(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], settings: dict[str, Any]
) -> dict[str, Any]:
    """Each source, in turns conversation by conversation."""
    times: dict[str, list[float]] = {name: [] for name in ("none", *SOURCES)}
    counts = {name: [0, 0, 0, 0] for name in SOURCES}
    for number, ids in enumerate(prompts):
        for name in times:
            sampler = make_sampler(**settings, seed=number)
            began = time.perf_counter()
            answer = list(
                kvant.stream_generate(
                    model, tokenizer, ids, max_tokens=TOKENS, sampler=sampler, **SOURCES.get(name, {})
                )
            )
            times[name].append(time.perf_counter() - began)
            if (drafts := answer[-1].drafts) is not None:
                new = drafts.steps, drafts.tokens, drafts.drafted, drafts.accepted
                counts[name] = [old + more for old, more in zip(counts[name], new, strict=True)]
    return {
        name: {
            "steps a token": round(steps / tokens, 3),
            "accepted": round(accepted / max(1, drafted), 3),
            "drafted": drafted,
            "wall": round(
                median(own / plain for own, plain in zip(times[name], times["none"], strict=True)), 2
            ),
        }
        for name, (steps, tokens, drafted, accepted) in counts.items()
    }


def _same(model: Any, tokenizer: Any, prompts: Sequence[list[int]], bits: int) -> dict[str, str]:
    """How many texts are those without drafts."""
    alone = 0
    for number, ids in enumerate(prompts):
        plain, drafted = (
            [
                each.token
                for each in kvant.stream_generate(
                    model,
                    tokenizer,
                    ids,
                    max_tokens=60,
                    sampler=make_sampler(0.7, 0.95, seed=number),
                    kv_bits=bits,
                    draft=draft,
                )
            ]
            for draft in ("none", "mtp")
        )
        alone += plain == drafted
    sampler = make_sampler(0.7, 0.95, seed=1)
    together = [
        kvant.batch_generate(
            model,
            tokenizer,
            list(prompts),
            max_tokens=60,
            sampler=sampler,
            kv_bits=bits,
            completion_batch_size=8,
            draft=draft,
            return_token_ids=True,
        ).token_ids
        for draft in ("none", "mtp")
    ]
    beside = sum(one == two for one, two in zip(*(own or [] for own in together), strict=True))
    return {"alone": f"{alone} of {len(prompts)}", "eight side by side": f"{beside} of {len(prompts)}"}


if __name__ == "__main__":
    main()
