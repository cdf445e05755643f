"""Train the pocket model: recall first, then stories and questions, then long contexts; resumable at any
step.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from batches import Batch, Feeder
from curriculum import STAGES
from exporting import export
from network import Network, Shape
from safetensors.torch import load_file
from scoring import Scorer
from torch.nn import functional


class Trainer:
    """The network, its optimizers, and where in the curriculum it is."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.network = Network(Shape(layers=args.layers, mlp=args.mlp, vocab=args.vocab))
        matrices = [(n, p) for n, p in self.network.named_parameters() if p.ndim == 2 and "embed" not in n]
        scorers = [p for n, p in matrices if "q_proj" in n or "k_proj" in n]
        rest = [p for n, p in matrices if "q_proj" not in n and "k_proj" not in n]
        others = [p for n, p in self.network.named_parameters() if p.ndim != 2 or "embed" in n]
        self.optimizers = [
            # Muon's updates have full rank and unit size: without a firm decay keys and scores grow until
            # their largest channels take the levels of a quantized cache (seen: 51 in a head with a mean
            # square of 8^2).
            torch.optim.Muon(
                [
                    {"params": scorers, "weight_decay": args.score_decay},
                    {"params": rest, "weight_decay": args.muon_decay},
                ],
                lr=args.muon_lr,
                momentum=0.95,
                ns_steps=5,
            ),
            torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.step = self.tokens = self.stage = self.stage_step = 0
        self.accuracy = 0.0
        self.seconds = 0.0
        self.began = time.time()

    def load_weights(self, folder: Path, stage: str) -> None:
        """Go on from an exported folder in the named stage, the optimizers afresh."""
        self.network.load_state_dict(load_file(str(folder / "model.safetensors")), strict=True)
        self.stage = next(index for index, entry in enumerate(STAGES) if entry.name == stage)

    def save(self, path: Path) -> None:
        """Write everything needed to go on."""
        state = {
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "shape": asdict(self.network.shape),
            "counts": [self.step, self.tokens, self.stage, self.stage_step, self.accuracy, self.seconds],
        }
        torch.save(state, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            if len(saved["param_groups"]) == len(optimizer.param_groups):
                decays = [group["weight_decay"] for group in optimizer.param_groups]
                optimizer.load_state_dict(saved)
                for group, decay in zip(optimizer.param_groups, decays, strict=True):
                    group["weight_decay"] = decay  # the arguments of this run, not of the last one
        self.step, self.tokens, self.stage, self.stage_step, self.accuracy, self.seconds = state["counts"]

    def scale(self, start: int) -> float:
        """Return the share of the peak learning rate: a short rise, a plateau, and a linear fall when
        asked for.
        """
        rise = min(1.0, (self.step + 1) / 100)
        if self.args.minutes:
            left = self.args.minutes - (time.time() - self.began) / 60
            return rise * min(1.0, max(0.0, left / self.args.fall))
        if not self.args.decay:
            return rise
        return rise * max(0.0, 1 - (self.step - start) / self.args.decay)

    def learn(self, batches: list[Batch], scale: float) -> tuple[float, float]:
        """Take one step; return the loss and the share of answer tokens that were right, over all workers."""
        total = sum(float(batch.weights[:, 1:].sum()) for batch in batches)
        loss_sum, right, asked, tokens = 0.0, 0, 0, 0
        for batch in batches:
            ids, weights = torch.from_numpy(batch.ids), torch.from_numpy(batch.weights)
            with torch.autocast("cpu", torch.bfloat16):
                logits = self.network.logits(self.network(ids[:, :-1])).flatten(0, 1)
            targets, weight = ids[:, 1:].flatten(), weights[:, 1:].flatten()
            losses = functional.cross_entropy(logits.float(), targets, reduction="none")
            loss = (losses * weight).sum() / total
            loss.backward()
            loss_sum += loss.item()
            answers = weight >= 1
            right += int((logits[answers].argmax(-1) == targets[answers]).sum())
            asked += int(answers.sum())
            tokens += batch.tokens
        loss_sum, right, asked, tokens = self.share([loss_sum, right, asked, tokens])
        self.tokens += int(tokens)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer, peak in zip(self.optimizers, (self.args.muon_lr, self.args.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.stage_step += 1
        return loss_sum / self.args.workers, right / max(1, asked)

    def share(self, numbers: list[float]) -> list[float]:
        """Average the gradients over the workers; return the sums of the numbers."""
        if self.args.workers == 1:
            return numbers
        gradients = [p.grad for p in self.network.parameters()]
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), torch.tensor(numbers)])
        dist.all_reduce(flat)
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient) / self.args.workers)
            start += gradient.numel()
        return flat[start:].tolist()

    def agree(self, scores: dict[str, float]) -> dict[str, float]:
        """Give every worker the scores of the first."""
        if self.args.workers == 1:
            return scores
        box = [scores]
        dist.broadcast_object_list(box)
        return box[0]

    def advance(self, scores: dict[str, float]) -> bool:
        """Move on to the next stage when this one is mastered."""
        stage = STAGES[self.stage]
        reached = self.accuracy if stage.gate == "drill" else scores.get(stage.gate, 0.0)
        if self.stage_step < 30 or reached < stage.accuracy:
            return False
        self.stage += 1
        self.stage_step = 0
        self.accuracy = 0.0
        return True

    def run(self) -> None:
        """Train until the steps are done, saving and scoring as it goes."""
        args = self.args
        feeder = Feeder(
            args.tokenizer,
            args.seed + self.step + 1000003 * args.rank,
            args.workers,
            self.network.shape.context,
            self.stage,
        )
        scorer = Scorer(args.tokenizer, self.network)
        start, began, mark, mark_tokens = self.step, time.time(), time.time(), self.tokens
        base = self.seconds
        end = start + (args.decay or args.steps)
        scores: dict[str, float] = {}
        leads = args.rank == 0
        self.began = began
        while self.step < end and not (args.minutes and time.time() - began > 60 * args.minutes):
            loss, accuracy = self.learn(feeder.next(), self.scale(start))
            self.accuracy += (accuracy - self.accuracy) * 0.1
            self.seconds = base + time.time() - began
            if self.step % args.log == 0 and leads:
                rate = (self.tokens - mark_tokens) / (time.time() - mark)
                print(
                    f"{time.strftime('%H:%M:%S')} step {self.step} {STAGES[self.stage].name} loss {loss:.3f} "
                    f"accuracy {self.accuracy:.3f} tokens {self.tokens / 1e6:.2f}M {rate:.0f}/s", flush=True
                )  # fmt: skip
                mark, mark_tokens = time.time(), self.tokens
            if self.step % args.save == 0 and leads:
                self.save(args.checkpoint)
            if STAGES[self.stage].gate != "drill" and self.step % args.score == 0:
                scores = self.agree(scorer.scores(args.per_kind) if leads else {})
                if leads:
                    print(
                        "  " + " ".join(f"{kind} {score:.2f}" for kind, score in scores.items()), flush=True
                    )
            if not args.decay and self.advance(scores):
                feeder.stage.value = self.stage
                if leads:
                    print(f"stage {STAGES[self.stage].name} at {self.tokens / 1e6:.2f}M tokens", flush=True)
        if leads:
            self.save(args.checkpoint)


def work(args: argparse.Namespace) -> None:
    """Train as one of the workers."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if args.workers > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{args.meeting}", rank=args.rank, world_size=args.workers
        )
    trainer = Trainer(args)
    source = args.source or args.checkpoint
    if source.exists():
        trainer.load(source)
    elif args.weights:
        trainer.load_weights(args.weights, args.stage)
    if args.export:
        export(trainer.network, args.tokenizer, args.export)
    else:
        trainer.run()


def main() -> None:
    """Train, go on training, let the learning rate fall, or export a checkpoint."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--source", type=Path, help="checkpoint to start from, when not the one written")
    parser.add_argument("--export", type=Path, help="write this folder from the checkpoint and stop")
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument(
        "--decay", type=int, default=0, help="fall to a learning rate of 0 in this many steps, then stop"
    )
    parser.add_argument(
        "--weights", type=Path, help="exported folder to start from when there is no checkpoint"
    )
    parser.add_argument("--stage", default="asking", help="stage in which --weights begins")
    parser.add_argument("--minutes", type=float, default=0, help="stop after this time")
    parser.add_argument(
        "--fall", type=float, default=40, help="minutes at the end in which the learning rate falls to 0"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mlp", type=int, default=640)
    parser.add_argument("--vocab", type=int, default=1280)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--muon-decay", type=float, default=0.1)
    parser.add_argument(
        "--score-decay", type=float, default=0.3, help="weight decay of the query and key projections"
    )
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--log", type=int, default=20)
    parser.add_argument("--save", type=int, default=100)
    parser.add_argument("--score", type=int, default=200)
    parser.add_argument("--per-kind", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2, help="processes that learn together")
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker")
    args = parser.parse_args()
    args.rank = 0
    if args.export:
        args.workers = 1
    with tempfile.TemporaryDirectory() as folder:
        args.meeting = f"{folder}/meeting"
        for rank in range(1, args.workers):
            other = argparse.Namespace(**{**vars(args), "rank": rank})
            mp.get_context("spawn").Process(target=work, args=(other,)).start()
        work(args)


if __name__ == "__main__":
    main()
