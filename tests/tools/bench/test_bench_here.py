"""A model over ranks, measured in rank 0's own process: its tokens, what a step sends, and what can go wrong."""

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import mlx.core as mx
import pytest
from rich.console import Console
from support.recordings import HEADER

from kvant.cache import ModelCache
from kvant.engine.load import find_model
from kvant.engine.run import Run
from kvant.errors import BenchError
from kvant.models import Decoder, load_decoder
from kvant.ranks.group import Ranks, Traffic
from kvant.tools.bench.adapters import Kvant
from kvant.tools.bench.engines import EngineSpec, with_drafts
from kvant.tools.bench.here import OverRanks
from kvant.tools.bench.prompts import Replay, random_prompts, with_answers
from kvant.tools.bench.recording import Header, Recorder, read_recording
from kvant.tools.bench.report import compare, table
from kvant.tools.bench.runner import Plan, measure
from kvant.tools.bench.summary import summarize

SPECS = (EngineSpec("kvant", 8, 32), EngineSpec("kvant", 0))
STEP = Traffic(sums=8, messages=1, bytes=9000)
PREFILL_BYTES = 1_000_000
TOKENS = 6


class Divided:
    """The embedded model, which counts as if each step sent something; a step may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.traffic = Traffic()
        self.model = load_decoder(find_model("pocket"))
        self.steps, self.fails = 0, (-1, Exception())
        usual = Decoder.next_logits

        def next_logits(model: Decoder, inputs: mx.array, cache: ModelCache) -> mx.array:
            self.steps += 1
            if self.steps == self.fails[0]:
                raise self.fails[1]
            self.traffic.sums += STEP.sums
            self.traffic.messages += STEP.messages
            self.traffic.bytes += STEP.bytes if inputs.size == 1 else PREFILL_BYTES
            return usual(model, inputs, cache)

        monkeypatch.setattr(Decoder, "next_logits", next_logits)

    def measure(self, file: Path, repeats: int = 2) -> list[str]:
        """A recording; what was told."""
        over = OverRanks(self.model, cast(Ranks, SimpleNamespace(size=2, traffic=self.traffic)), "tensor")
        plan = Plan(SPECS, Path("not read"), 512, (8, 16), TOKENS, repeats, random_prompts(7, 1280))
        told: list[str] = []
        with Recorder(file) as recorder:
            recorder.write(Header(**HEADER | {"baseline": SPECS[0].label}))
            measure(plan, recorder, told.append, over_ranks=over)
        return told


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> Divided:
    return Divided(monkeypatch)


def test_tokens_and_what_a_step_sends(divided: Divided, tmp_path: Path) -> None:
    told = divided.measure(tmp_path / "a.jsonl")
    recording = read_recording(tmp_path / "a.jsonl")
    assert not [line for line in told if "loading" in line]  # it is loaded
    assert recording.engines["kvant 8-bit"].weight_bytes == divided.model.nbytes
    assert len(recording.runs) == len(recording.sent) == 2 * 2 * 2
    for sent in recording.sent.values():
        assert (sent.ranks, sent.parallel, sent.steps) == (2, "tensor", TOKENS - 1)  # the prompt's step is not one
        assert (sent.sums, sent.messages, sent.bytes) == tuple(
            (TOKENS - 1) * each for each in (STEP.sums, STEP.messages, STEP.bytes)
        )
    for run in recording.runs:
        prompt = random_prompts(7, 1280)(run.context, run.run).ids
        cache = divided.model.make_cache(64, quant_bit=recording.engines[run.engine].kv_bits or 0)
        expected = [token for token, _ in Run(divided.model, prompt, cache, max_tokens=TOKENS)]
        assert list(run.token_ids or ()) == expected

    summaries = summarize(recording)
    assert [s.latency_p50_ms is not None and s.latency_p50_ms > 0 for s in summaries] == [True] * 4
    assert {(s.ranks, s.parallel, s.sums_per_token, s.messages_per_token) for s in summaries} == {(2, "tensor", 8, 1)}
    assert {s.sent_bytes_per_token for s in summaries} == {9000}
    Console(width=160, file=(printed_to := StringIO())).print(table(summaries))
    printed = printed_to.getvalue()
    assert "Between ranks" in printed
    assert "2 ranks, tensor." in printed
    assert "9.00" in printed


def test_drafts_of_a_known_text(divided: Divided, tmp_path: Path) -> None:
    """With drafts or without, the answer that was given is generated; it repeats the prompt, or cannot be drafted."""
    specs = with_drafts([EngineSpec("kvant", 8, 32)], "prompt")
    assert [spec.label for spec in specs] == ["kvant 8-bit", "kvant 8-bit, drafts"]
    over = OverRanks(divided.model, cast(Ranks, SimpleNamespace(size=2, traffic=divided.traffic)), "tensor")
    for kind in get_args(Replay):
        prompts = with_answers(random_prompts(7, 1280), kind, 7, 1280, 30)
        plan = Plan(specs, Path("not read"), 512, (20,), 30, 1, prompts)
        with Recorder(tmp_path / f"{kind}.jsonl") as recorder:
            recorder.write(Header(**HEADER | {"baseline": "kvant 8-bit"}))
            told: list[str] = []
            measure(plan, recorder, told.append, over_ranks=over)
        recording = read_recording(tmp_path / f"{kind}.jsonl")
        prompt = prompts(20, 0)
        assert prompt.answer is not None
        assert [list(run.token_ids or ()) for run in recording.runs] == [prompt.answer] * 2
        changed = sum(a != b for a, b in zip(prompt.answer, prompt.ids * 2, strict=False))
        assert (changed < 8) == (kind == "edit")
        [found] = recording.drafts.values()
        plain, drafted = summarize(recording)
        assert drafted.tokens_per_step == pytest.approx(29 / found.steps)
        assert plain.tokens_per_step is None
        assert f"kvant 8-bit, drafts: first token {drafted.first_token_ms:.1f} ms, " in told[-1]
        assert told[-1].endswith(f"then {drafted.ms_per_token:.2f} ms a token")
        assert kind == "edit" or found.accepted <= 2


def test_a_draft_model(divided: Divided, pocket_folder: Path) -> None:
    [plain, drafting] = with_drafts([EngineSpec("kvant", 0)], "model", str(pocket_folder), 3)
    adapters = [Kvant(spec, divided.model, 512) for spec in (plain, drafting)]
    texts = [list(islice(adapter.tokens(range(20, 50), 12), 12)) for adapter in adapters]
    assert texts[0] == texts[1]
    assert adapters[0].drafts is None
    assert adapters[1].drafts is not None
    assert adapters[1].weight_bytes == (2 * divided.model.nbytes, divided.model.nbytes_read)


def test_a_comparison_says_how_many_ranks(divided: Divided, tmp_path: Path) -> None:
    divided.measure(tmp_path / "a.jsonl", repeats=1)
    divided_over_two = read_recording(tmp_path / "a.jsonl")
    alone = replace(divided_over_two)
    for kept in ("engines", "runs", "tokens", "_tokens_of"):
        setattr(alone, kept, getattr(divided_over_two, kept))
    Console(width=160, file=(printed_to := StringIO())).print(compare(alone, divided_over_two))
    assert "Differs: kvant 8-bit's ranks, 1 and 2" in printed_to.getvalue()


def test_an_interruption_keeps_the_tokens_so_far(divided: Divided, tmp_path: Path) -> None:
    # 2 engines warm up with 8 tokens of context, 7 steps each; the prompt and two tokens more, then Ctrl-C.
    divided.fails = (2 * (TOKENS + 1) + 4, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        divided.measure(tmp_path / "a.jsonl")
    recording = read_recording(tmp_path / "a.jsonl")
    assert (len(recording.tokens), recording.runs, recording.sent) == (2, [], {})


def test_an_error_names_the_engine(divided: Divided, tmp_path: Path) -> None:
    divided.fails = (3, RuntimeError("[ring] no\nmore"))
    with pytest.raises(BenchError, match=r"^engine kvant 8-bit: \[ring\] no$"):
        divided.measure(tmp_path / "a.jsonl")


def test_a_line_of_what_was_sent(divided: Divided, tmp_path: Path) -> None:
    """Field by field, and refused where it does not belong."""
    file = tmp_path / "a.jsonl"
    divided.measure(file, repeats=1)
    lines = list(map(json.loads, file.read_text().splitlines()))
    [index, *_] = [number for number, line in enumerate(lines) if line["kind"] == "sent"]
    assert lines[index] == {
        "kind": "sent",
        "engine": "kvant 8-bit",
        "run": 0,
        "context": 8,
        "ranks": 2,
        "parallel": "tensor",
        "steps": 5,
        "sums": 40,
        "messages": 5,
        "bytes": 45_000,
    }

    def refused(change: Callable[[dict[str, Any]], Any]) -> str:
        copy = [dict(line) for line in lines]
        change(copy[index])
        other = tmp_path / "b.jsonl"
        other.write_text("".join(json.dumps(line) + "\n" for line in copy))
        with pytest.raises(Exception, match=f"line {index + 1}: ") as error:
            read_recording(other)
        return str(error.value).partition(": ")[2]

    assert refused(lambda line: line.update(ranks=1)) == "ranks is 1; expected a whole number of at least 2"
    assert refused(lambda line: line.pop("sums")) == "the sent line lacks sums"
    assert "expected an engine named before" in refused(lambda line: line.update(engine="other"))
