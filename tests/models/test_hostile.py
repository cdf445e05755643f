"""Model folders made to do harm as a whole: links, code, time and memory, the command. Files:
test_hostile_files.py.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.bridged import copy_folder, write_config, write_mlx_lm
from support.checkpoints import CONFIGS as NATIVE
from support.checkpoints import qwen3_moe_config
from support.command import call
from support.counts import count
from support.hostile import MESSAGES, change, one_line, refused, sparse
from support.tiny_models import CONFIGS

import kvant
from kvant.bridge.config import check
from kvant.bridge.folder import build
from kvant.engine.load import load_model
from kvant.errors import CheckpointError, KvantError, ModelError, PromptError
from kvant.models import ModelConfig, load_decoder
from kvant.plan import read_folder
from kvant.text.tokenizer import load_tokenizer
from kvant.tools.bench.adapters import MLXLM, Kvant
from kvant.tools.bench.engines import EngineSpec

CLASSES = ("tokenization_evil.Tokenizer", "Tokenizer", "Qwen2TokenizerFast")
GOOD: list[tuple[str, dict[str, Any]]] = [
    *((base, {}) for base in ("native", "shards", "bridged")),
    *(("native", {"tokenizer_class": name, "trust_remote_code": True}) for name in CLASSES),
]


@pytest.mark.parametrize(("folder", "changes"), GOOD, indirect=["folder"])
def test_a_good_folder_answers_and_code_beside_it_stays_closed(folder: Path, changes: dict[str, Any]) -> None:
    change(folder / "tokenizer_config.json", **changes)
    model, tokenizer = kvant.load(folder)
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert len(list(kvant.stream_generate(model, tokenizer, ids, max_tokens=2))) > 0


def _hub(folder: Path, blobs: Path) -> Path:
    """The folder as the Hugging Face cache has it: every file a link to a blob."""
    snapshot = folder.parent / "hub/models--owner--name/snapshots/0123abc"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        path.rename(blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    return snapshot


def test_the_hub_cache_is_accepted_and_another_repository_of_it_is_not(folder: Path) -> None:
    other = Path(shutil.copytree(folder, folder.parent / "other" / "model"))
    snapshot = _hub(folder, folder.parent / "hub/models--owner--name/blobs")
    _, tokenizer = kvant.load(snapshot)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False).startswith("<|im_start|>user")
    snapshot = _hub(other, other.parent / "hub/models--somebody--else/blobs")
    refused(snapshot, ModelError, r"config\.json: a link out of the model folder")


def test_links_within_the_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    link = folder.with_name("link")
    link.symlink_to(folder)
    assert load_decoder(link).config.vocab_size == 1280


@pytest.mark.parametrize("changes", [{"auto_map": {"AutoModel": "evil.Model"}}, {"model_file": "evil.py"}])
def test_the_benchmark_refuses_code_too(folder: Path, changes: dict[str, Any]) -> None:
    change(folder / "config.json", **changes)
    for engine, kind in (("kvant", Kvant), ("mlx-lm", MLXLM)):
        with one_line(ModelError, "names code"):
            kind(EngineSpec(engine, 0), folder, 512)


@pytest.mark.parametrize("folder", ["shards"], indirect=True)
def test_a_shard_nobody_names_is_not_opened(folder: Path) -> None:
    (folder / "model-00003-of-00002.safetensors").write_bytes(b"no safetensors")
    assert load_decoder(folder).config.vocab_size == 1280
    with one_line(CheckpointError, r"model-00003-of-00002\.safetensors: not among the model's files"):
        MLXLM(EngineSpec("mlx-lm", 0), folder, 512)


def test_a_list_of_templates_and_an_empty_one(folder: Path) -> None:
    shutil.rmtree(folder / "additional_chat_templates")
    (folder / "chat_template.jinja").write_text("")
    model, tokenizer = kvant.load(folder)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == ""
    with pytest.raises(PromptError, match="the prompt is empty"):
        kvant.generate(model, tokenizer, tokenizer.apply_chat_template(MESSAGES))
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "first"}, {"name": "other", "template": "{{ 'a' * 10**10 }}"}]
    change(folder / "tokenizer_config.json", chat_template=named)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "first"
    with pytest.raises(KvantError, match="too much memory"):
        tokenizer.apply_chat_template(MESSAGES, chat_template="other")


BOMBS: dict[str, tuple[str, dict[str, Any]]] = {
    "emb_neighbor_num": ("longcat_flash_ngram", {"emb_neighbor_num": 3000, "emb_split_num": 1}),
    "emb_split_num": ("longcat_flash_ngram", {"emb_neighbor_num": 2, "emb_split_num": 2**24 - 1}),
    "hybrid_override_pattern": ("nemotron_h", {"hybrid_override_pattern": "-" * 800_000}),
    "layer_types": ("granitemoehybrid", {"layer_types": ["mamba"] * 320_000}),
    "altup_num_inputs": ("gemma3n", {"altup_num_inputs": 46_000}),
    "num_attention_heads": ("bailing_moe_linear", {"num_attention_heads": 2**24}),
    "num_loops": ("nanbeige", {"num_loops": 2**24}),
    "block_types": ("recurrent_gemma", {"block_types": [[]] * 300_000}),
    "mlp_only_layers": ("qwen3_moe", {"mlp_only_layers": [0] * 300_000}),
}


class Unwalked(list[Any]):
    """A list that nobody may walk."""

    def __iter__(self) -> Iterator[Any]:
        pytest.fail("it was walked")


class UnwalkedObject(dict[str, Any]):
    def __iter__(self) -> Iterator[str]:
        pytest.fail("it was walked")

    def items(self) -> Any:
        pytest.fail("it was walked")


LONG_LIST, LONG_OBJECT = Unwalked([0] * 300_000), UnwalkedObject({str(key): 0 for key in range(60_000)})
NATIVE_KEYS = [
    "layer_types",
    "eos_token_id",
    "mlp_only_layers",
    "rope_parameters",
    "quantization",
    "model_type",
    "auto_map",
]
BRIDGED_KEYS = ["block_types", "emb_neighbor_num", "layer_types", "eos_token_id", "text_config", "auto_map"]


@pytest.mark.parametrize("long", [LONG_LIST, LONG_OBJECT], ids=["list", "object"])
def test_what_is_too_long_is_refused_before_it_is_walked(long: Any) -> None:
    refusing: list[tuple[Callable[[dict[str, Any]], object], dict[str, Any], list[str]]] = [
        (ModelConfig.from_dict, qwen3_moe_config(), NATIVE_KEYS),
        (check, {"model_type": "gemma3", **CONFIGS["gemma3"]}, BRIDGED_KEYS),
    ]
    for refuse, config, keys in refusing:
        for key in keys:
            for raw in (
                config | {key: long},
                config | {"text_config": {key: long}},
                config | {key: [{"a": long}]},
            ):
                with one_line(ModelError, rf"\b({key}|a) has a length of {len(long)}; expected at most"):
                    refuse(raw)


@pytest.mark.parametrize("name", BOMBS)
def test_configs_that_would_take_all_memory(tmp_path: Path, name: str) -> None:
    """Small files whose classes would make objects without end, before a tensor is looked at."""
    kind, changes = BOMBS[name]
    raw = {"model_type": kind, **(NATIVE.get(kind) or CONFIGS[kind])}
    write_config(
        tmp_path, raw | ({"text_config": raw["text_config"] | changes} if "text_config" in raw else changes)
    )
    refused(tmp_path, ModelError, rf"config\.json: {name} (is|has)")
    with one_line(ModelError, name):
        read_folder(tmp_path)  # as a plan does


def test_no_size_is_allocated_by_asking_a_class() -> None:
    """dbrx's reads which experts a token goes to, which would compute its random weights."""
    mx.reset_peak_memory()
    build({"model_type": "dbrx", **CONFIGS["dbrx"], "vocab_size": 2**24})
    assert mx.get_peak_memory() - mx.get_active_memory() < 10**7


JUNK: list[Any] = [
    None,
    True,
    0,
    -1,
    3,
    2**24,
    2**70,
    0.5,
    float("nan"),
    float("inf"),
    "x",
    "",
    [],
    [0],
    {},
    {"a": 1},
]


@pytest.mark.filterwarnings("ignore:config.json ties the output head")
def test_any_settings_of_a_bridged_config(tmp_path: Path) -> None:
    rng = random.Random(0)
    folders = [copy_folder("gpt-oss", tmp_path), write_mlx_lm(tmp_path / "quantized", "qwen3_next", 4)]
    originals = [(folder / "config.json").read_text() for folder in folders]
    loaded = 0
    for _ in range(count(75, 3000)):
        number = rng.randrange(2)
        raw = json.loads(originals[number])
        for key in rng.sample(sorted(raw), rng.choice([1, 1, 2])):
            inner = raw[key] if raw[key] and isinstance(raw[key], dict) else None
            holder, name = (raw, key) if inner is None else (inner, rng.choice(sorted(inner)))
            holder[name] = rng.choice(JUNK)
        write_config(folders[number], raw)
        try:
            load_model(folders[number]).make_cache(8)
            loaded += 1
        except ModelError as error:
            assert "\n" not in str(error)  # noqa: PT017
    assert loaded


SIZES = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
ABSURD: dict[str, Any] = {**dict.fromkeys(SIZES, 2**24), "max_position_embeddings": 2**24}
ABSURD["num_hidden_layers"] = count(256, 4096)  # tests/plan plans 4096
ABSURD["quantization"] = {"bits": 3, "group_size": 32}  # planned part by part
GENERATE = ["generate", "Hello!", "-q", "--model", "."]
SAID: list[tuple[str, list[str], Callable[[Path], object], str]] = [
    ("native", GENERATE, lambda folder: sparse(folder, {"a": (2**40,)}), "unexpected tensor a"),
    (
        "native",
        GENERATE,
        lambda folder: change(folder / "config.json", model_file="evil.py"),
        "model_file names code",
    ),
    ("native", GENERATE, lambda folder: change(folder / "config.json", **ABSURD), "no context fits"),
    *(
        (
            "bridged",
            way,
            lambda folder: change(folder / "config.json", num_attention_heads=0),
            "rejects it",
        )
        for way in (GENERATE, ["plan", "."])
    ),
]


@pytest.mark.parametrize(("folder", "arguments", "spoil", "said"), SAID, indirect=["folder"])
def test_the_command_says_one_line(
    folder: Path,
    arguments: list[str],
    spoil: Callable[[Path], object],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil(folder)
    monkeypatch.chdir(folder)
    done = call(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("kvant: error: ")
    assert said in done.stderr


def test_the_engines_of_a_benchmark_import_nothing_from_the_current_folder(folder: Path) -> None:
    options = [
        "--kv-bits",
        "8",
        "--repeats",
        "1",
        "--max-tokens",
        "2",
        "--prompt-tokens",
        "8",
        "--model",
        ".",
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(kvant.__file__).parents[1])}
    program = "import sys; from kvant.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", program, "bench", "--engine", "kvant", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
