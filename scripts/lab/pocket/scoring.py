"""Scoring while training: whole answers by kind, and whether requested names are honoured."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from batches import Batch, encode, pack_all
from corpus import heldout_documents
from document import ANSWER_WEIGHT, Document
from network import Network
from tokenizers import Tokenizer


class Scorer:
    """Held-out documents and what a network makes of them."""

    def __init__(self, folder: Path, network: Network, seed: int = 11) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.network = network
        self.seed = seed

    @torch.no_grad()
    def scores(self, per_kind: int) -> dict[str, float]:
        """Return the share of exact answers by kind, and of names honoured.

        An answer is exact when every one of its tokens is the likeliest given those before it, which is the
        same as being written greedily.
        """
        by_kind: dict[str, list[Document]] = defaultdict(list)
        for document in heldout_documents(self.seed, per_kind):
            by_kind[document.kind].append(document)
        out = {}
        with torch.autocast("cpu", torch.bfloat16):
            for kind, documents in sorted(by_kind.items()):
                if any(turn.weight == ANSWER_WEIGHT for turn in documents[0].turns):
                    out[kind] = self._answers(documents)
            out["names"] = self._names(by_kind["story"])
        return out

    def _answers(self, documents: list[Document]) -> float:
        right = total = 0
        rows = [row for row in encode(self.tokenizer, documents) if len(row[0]) <= self.network.shape.context]
        for batch in pack_all(rows, 4096):
            for good in self._spans(batch):
                right += good
                total += 1
        return right / total

    def _spans(self, batch: Batch) -> list[bool]:
        """Say for each answer in a batch whether all its tokens are the likeliest."""
        ids = torch.from_numpy(batch.ids)
        best = self.network.logits(self.network(ids[:, :-1])).argmax(-1).numpy()
        hits = np.concatenate([np.zeros((len(ids), 1), bool), best == batch.ids[:, 1:]], 1)
        out = []
        for row, weights in zip(hits, batch.weights, strict=True):
            marks = np.flatnonzero(np.diff(np.concatenate([[0], weights == ANSWER_WEIGHT, [0]]).astype(int)))
            out += [bool(row[a:b].all()) for a, b in marks.reshape(-1, 2)]
        return out

    def _names(self, documents: list[Document], length: int = 28) -> float:
        """Write the start of each story greedily and look for the hero's name."""
        prompts = []
        for document in documents:
            ask = next(turn.text for turn in document.turns if turn.role == "user")
            prompts.append(
                self.tokenizer.encode(f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n").ids
            )
        rows = [list(prompt) for prompt in prompts]
        for _ in range(length):
            width = max(len(row) for row in rows)
            ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
            last = torch.tensor([len(row) - 1 for row in rows])
            hidden = self.network(ids)[torch.arange(len(rows)), last]
            for row, token in zip(rows, self.network.logits(hidden).argmax(-1).tolist(), strict=True):
                row.append(token)
        texts = [self.tokenizer.decode(row[len(prompt) :]) for row, prompt in zip(rows, prompts, strict=True)]
        good = [
            re.search(rf"\b{document.hero}\b", text) is not None
            for document, text in zip(documents, texts, strict=True)
        ]
        return sum(good) / len(good)
