"""``kvant bench`` as ranks of one group, as their user meets them."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.counts import count
from support.ranks import run_ranks

from kvant.cli.bench_options import refuse_over_ranks
from kvant.cli.options import BadValueError
from kvant.engine.load import find_model
from kvant.engine.run import Run
from kvant.models import load_decoder
from kvant.tools.bench.prompts import random_prompts
from kvant.tools.bench.recording import read_recording

KVANT = [sys.executable, "-W", "error", "-m", "kvant"]
LAYERS, HIDDEN = 4, 256  # pocket's


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as two ranks; what rank 0 returned and wrote. The other is silent and ends alike."""
    first, second = run_ranks([[*KVANT, *arguments]] * 2)
    assert (second.returncode, second.stdout, second.stderr) == (first.returncode, "", "")
    return first


@pytest.mark.parametrize("parallel", count(["tensor"], ["pipeline", "tensor"]))
def test_bench(parallel: str, tmp_path: Path) -> None:
    file = tmp_path / "ranks.jsonl"
    small = ["--prompt-tokens", "16", "-m", "8", "--repeats", "1", "--kv-bits", "8,0", "--draft", "prompt"]
    done = run("bench", *small, "--parallel", parallel, "--output", str(file))
    assert done.returncode == 0, done.stderr
    assert f"2 ranks, {parallel}." in done.stdout
    assert "warming up" in done.stderr
    recording = read_recording(file)
    labels = ["kvant 8-bit", "kvant 8-bit, drafts", "kvant full", "kvant full, drafts"]  # and no mlx-lm
    assert list(recording.engines) == labels
    assert {label for label, _, _ in recording.drafts} == {labels[1], labels[3]}
    model = load_decoder(find_model("pocket"))
    for line in recording.runs:
        cache = model.make_cache(64, quant_bit=recording.engines[line.engine].kv_bits or 0)
        expected = [token for token, _ in Run(model, random_prompts(0, 1280)(16, 0).ids, cache, max_tokens=8)]
        assert list(line.token_ids or ()) == expected  # of one process
    for sent in recording.sent.values():
        assert (sent.ranks, sent.parallel, sent.steps) == (2, parallel, 7)
        if sent.engine in (labels[1], labels[3]):
            continue
        # A token's activations: summed twice a layer, or to rank 1 and back.
        sums, messages = (2 * LAYERS, 0) if parallel == "tensor" else (0, 2)
        size = HIDDEN * model.dtype.size
        assert (sent.sums, sent.messages, sent.bytes) == (7 * sums, 7 * messages, 7 * (sums + messages) * size)


def test_engines_over_ranks() -> None:
    assert refuse_over_ranks(None, None, None, []) == ["kvant"]
    assert refuse_over_ranks(["kvant:unfused"], None, None, []) == ["kvant:unfused"]
    for arguments, problem in (
        ((["kvant", "mlx-lm:float32"], None, None, []), "--engine is 'mlx-lm:float32'"),
        ((None, None, "1,4", []), "--streams is 1,4; on several ranks bench measures kvant with one request at a time"),
        ((None, None, None, ["http://x"]), "--server is http://x; "),
        ((None, "pocket", None, []), "--random is 'pocket'; on several ranks expected a model folder"),
    ):
        with pytest.raises(BadValueError) as error:
            refuse_over_ranks(*arguments)  # type: ignore[arg-type]
        assert problem in str(error.value)
