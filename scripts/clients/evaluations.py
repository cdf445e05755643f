"""Run lm-evaluation-harness and guidellm against kvant serve on the embedded model, without a network.

Usage: python scripts/clients/evaluations.py PYTHON
PYTHON is the interpreter of an environment of evaluations/requirements.txt. Multiple choice is compared with
mlx-lm's own evaluation of the same weights, which has its log-likelihoods from the model itself. Ends with
exit code 1 when a check fails.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

AGREE = 1e-4  # of log-likelihoods: both in float32
PAIRS = [
    ("red", "blue"),
    ("old", "new"),
    ("small", "big"),
    ("quick", "slow"),
    ("happy", "sad"),
    ("wet", "dry"),
]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}


def main() -> int:
    """Start the server, which has no quantized cache, and run this file in the other environment."""
    from run import serving

    from kvant.engine.load import find_model

    with tempfile.TemporaryDirectory() as scratch, serving(Path(scratch) / "log", "--kv-bits", "0") as url:
        command = [sys.argv[1], __file__, url, str(find_model("pocket")), scratch]
        return subprocess.run(command, env=os.environ | OFFLINE | {"HF_HOME": scratch}).returncode


def measure(url: str, model: str, scratch: Path) -> int:
    """The checks. Returns how many failed."""
    import lm_eval.models  # they register themselves, before mlx-lm's
    import mlx.core as mx
    from mlx_lm.evaluate import MLXLM

    reference = MLXLM(model)
    reference._model.set_dtype(mx.float32)
    served = {"model": "pocket", "tokenizer": model, "base_url": f"{url}/v1/completions"}
    found, expected = (
        lm_eval.simple_evaluate(model=each, model_args=arguments, tasks=[_choices(scratch)], log_samples=True)
        for each, arguments in (("local-completions", served), (reference, None))
    )
    likelihoods = [
        [choice[0][0] for sample in each["samples"]["choices"] for choice in sample["resps"]]
        for each in (found, expected)
    ]
    worst = max(abs(a - b) for a, b in zip(*likelihoods, strict=True))
    right = len(likelihoods[0]) == 3 * len(PAIRS) and worst < AGREE
    right &= found["results"]["choices"]["acc,none"] == expected["results"]["choices"]["acc,none"]
    failed = _said(
        "lm_eval: multiple choice is mlx-lm's own", right, f"{worst:.1e} of a log-likelihood apart"
    )

    story = lm_eval.simple_evaluate(
        model="local-chat-completions",
        model_args=served | {"base_url": f"{url}/v1/chat/completions"},
        tasks=[_choices(scratch, "generate_until")],
        apply_chat_template=True,
        log_samples=True,
    )
    texts = [sample["filtered_resps"][0] for sample in story["samples"]["texts"]]
    failed += _said("lm_eval: texts", len(texts) == len(PAIRS) and all(texts), f"{texts[0]!r:.60}")

    report = scratch / "report.json"
    options = [
        "--rate-type",
        "concurrent",
        "--rate",
        "2",
        "--max-requests",
        "6",
        "--output-path",
        str(report),
    ]
    options += ["--data", "prompt_tokens=64,output_tokens=16", "--processor", model, "--target", url]
    guidellm = Path(sys.executable).with_name("guidellm")
    done = subprocess.run(
        [guidellm, "benchmark", "run", *options], capture_output=True, text=True, timeout=120
    )
    told = json.loads(report.read_text())["benchmarks"][0] if report.exists() else {}
    totals = told.get("run_stats", {}).get("requests_made", {})
    right = done.returncode == 0 and totals.get("successful") == 6 and not totals.get("errored")
    return failed + _said("guidellm: a benchmark", right, f"{totals} {'' if right else done.stderr[-800:]}")


def _choices(scratch: Path, kind: str = "multiple_choice") -> dict[str, Any]:
    """A task of our own, of a file of questions."""
    questions = [
        {"q": f"The {a} fox sees the {b} bear. The fox is", "c": [a, b, "gone"], "a": n % 2}
        for n, (a, b) in enumerate(PAIRS)
    ]
    path = scratch / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, questions)))
    task = {
        "task": "choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": kind,
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{c}}",
        "doc_to_target": "{{a}}",
    }
    if kind == "multiple_choice":
        return task | {"metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]}
    until = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    del task["doc_to_choice"]
    metrics = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    return task | {
        "task": "texts",
        "doc_to_target": "{{q}}",
        "generation_kwargs": until,
        "metric_list": metrics,
    }


def _said(check: str, right: bool, more: str) -> int:
    print(f"{'ok    ' if right else 'FAILED'} {check}: {more}", flush=True)
    return not right


if __name__ == "__main__":
    sys.exit(main() if len(sys.argv) == 2 else measure(sys.argv[1], sys.argv[2], Path(sys.argv[3])) > 0)
