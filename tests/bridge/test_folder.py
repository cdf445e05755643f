"""Folders of architectures that only mlx-lm has: loaded, run and planned as native ones are."""

import json
from pathlib import Path
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model as load_mlx_lm
from support.bridged import IDS, NAMES, copy_folder, write_config, write_mlx_lm
from support.checkpoints import change_tensors
from support.command import call
from support.counts import count
from support.runs import Run

from kvant.bridge.model import BridgedModel
from kvant.bridge.pool import BridgedCache
from kvant.cache import CacheOptions, ModelCache
from kvant.engine.load import load_model
from kvant.errors import ModelError
from kvant.models import LanguageModel
from kvant.plan import BridgedCheckpoint, MemoryPlan, Settings, plan, read_facts, read_folder
from kvant.tools.bench.adapters import MLXLM, Kvant
from kvant.tools.bench.engines import EngineSpec

PROMPT = " ".join(f"w{token}" for token in IDS if token > 1)
QUANTIZED = ["gpt_oss", "gemma3_text", "gemma4_text", "qwen3_next", "qwen3_5", "deepseek_v3", "llama4"]


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that transformers saved, with a tokenizer."""
    return copy_folder(request.param, tmp_path_factory.mktemp("bridged"), tokenizer=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return load_model(folder)


def _keys_values(cache: ModelCache) -> int:
    return cache.used.keys_values if isinstance(cache, BridgedCache) else cache.nbytes


def test_logits_are_those_of_transformers(folder: Path, model: LanguageModel) -> None:
    expected = np.load(folder / "logits.npy")
    limit = 1e-5 * max(1.0, float(np.abs(expected).max()))
    given = [model(mx.array([IDS]))]
    for size in (len(IDS), 5):
        cache = model.make_cache(len(IDS), kv_bits=0)
        pieces = [model(mx.array([IDS[i : i + size]]), cache=cache) for i in range(0, len(IDS), size)]
        given.append(mx.concatenate(pieces, axis=1))
    for logits in given:
        assert np.abs(np.array(logits)[0] - expected).max() < limit
    cache = model.make_cache(len(IDS), kv_bits=0)
    mx.eval(model.feed(mx.array([IDS[:9]]), cache))
    cache.commit()
    for place, token in enumerate(IDS[9:], start=9):
        step = np.array(model.next_logits(mx.array([[token]]), cache))
        cache.commit()
        assert np.abs(step[0] - expected[place]).max() < limit


@pytest.mark.parametrize("turn", count([0], [0, 1]))
def test_generate(folder: Path, model: LanguageModel, turn: int) -> None:
    """The command gives the tokens of the API, and names the bytes before the first and after the last."""
    bits = (8, 4)[(folder.name in NAMES[::2]) ^ turn]
    done = call("generate", "--model", str(folder), "--kv-bits", str(bits), "-m", "20", "--json", PROMPT)
    assert done.returncode == 0, done.stderr
    tokens = [json.loads(line)["token"] for line in done.stdout.splitlines()]
    cache = model.make_cache(128, kv_bits=bits)
    prompt = [token for token in IDS if token > 1]
    assert tokens == [token for token, _ in Run(model, prompt, cache, max_tokens=20, stop_tokens=[1])]
    lines = [line for line in done.stderr.splitlines() if line.startswith("cache: 128 tokens reserved")]
    assert len(lines) == 1
    assert ("for the state of linear layers" in lines[0]) == (folder.name in ("qwen3-next", "qwen3.5"))


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_the_plan_is_what_is_held(folder: Path, bits: int) -> None:
    """Keys and values before the first token and after the last, the state, the weights; the rest is
    enough.
    """
    made = plan(
        read_folder(folder),
        max_kv_size=100,
        settings=Settings(cache=CacheOptions(kv_bits=bits)),
        device="cpu",
    )
    mx.clear_cache()
    before = mx.get_active_memory()
    model = load_model(folder)
    mx.reset_peak_memory()
    assert made.weights == model.nbytes == sum(array.nbytes for array in model.arrays)
    assert model.nbytes_read <= model.nbytes
    cache = model.make_cache(100, kv_bits=bits)
    assert _keys_values(cache) == made.cache
    assert cache.nbytes == made.cache  # nothing of a state yet
    tokens = list(Run(model, [token % 60 + 2 for token in range(90)], cache, max_tokens=-1))
    assert len(tokens) == 11
    assert _keys_values(cache) == made.cache
    assert cache.nbytes - _keys_values(cache) == made.state
    assert mx.get_peak_memory() - before <= made.arrays


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return load_model(copy_folder("gpt-oss", tmp_path_factory.mktemp("gpt-oss")))


def test_what_differs_from_a_decoder(gpt_oss: LanguageModel) -> None:
    model = gpt_oss
    assert isinstance(model, BridgedModel)
    assert model.dtype == mx.float32
    refused: list[tuple[Any, tuple[Any, ...], str]] = [
        (model, (mx.array([[0, 64]]),), "token ids 0 to 64; the model knows 0 to 63"),
        (model, (mx.array([[1]]), 3, model.make_cache(8)), "offset is 3; the cache holds 0 tokens"),
        (
            model,
            (mx.array([1]), None, model.make_cache(8)),
            r"inputs has shape \(1,\); expected \(B, S\) token ids",
        ),
        (model.check_cache, ([],), "a list of 0 layers; expected all layers of one cache"),
        (model.check_cache, ([object()],), r"holds a object; expected the result of model\.make_cache"),
        (model.check_cache, (5,), r"the cache is a int; expected the result of model\.make_cache"),
    ]
    for function, arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            function(*arguments)
    with pytest.raises(kvant.errors.ContextError, match="this machine has"):
        model.make_cache(2**40)
    both = model(mx.array([IDS, IDS[::-1]]))
    alone = model(mx.array([IDS[::-1]]), cache=model.make_cache(64, kv_bits=0))
    assert mx.abs(both[1] - alone[0]).max().item() < 1e-5  # type: ignore[operator]


def test_a_cache_of_another_model_is_refused(gpt_oss: LanguageModel, tmp_path: Path) -> None:
    """gpt-oss computed through Gemma's windows. One of the same shape serves: here that of a second load."""
    second, other = (load_model(copy_folder(name, tmp_path)) for name in ("gpt-oss", "gemma3"))
    with pytest.raises(ValueError, match="for a model with other layers"):
        gpt_oss(mx.array([IDS]), cache=other.make_cache(64))
    assert gpt_oss(mx.array([IDS]), cache=second.make_cache(64)).shape[0] == 1


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    folder = copy_folder("gpt-oss", tmp_path, tokenizer=True)
    with pytest.raises(ModelError, match="adapters need an architecture that kvant implements"):
        kvant.load(folder, adapter_path=folder)


def test_the_context_is_the_class_s_own_where_the_folder_has_none(tmp_path: Path) -> None:
    """Of gpt-oss mlx-lm's class has none: the reservation is the only limit."""
    limits = {
        name: load_model(copy_folder(name, tmp_path, max_position_embeddings=None, architectures=None)).config
        for name in ("gemma3", "gpt-oss")
    }
    assert limits["gemma3"].max_position_embeddings == 32768
    assert limits["gpt-oss"].max_position_embeddings is None
    made = plan(read_folder(tmp_path / "gpt-oss"), max_kv_size=10**6, device="cpu")
    assert made.cache > 10**6


@pytest.mark.parametrize("name", QUANTIZED)
def test_mlx_lm_s_own_folders(name: str, tmp_path: Path) -> None:
    folder = write_mlx_lm(tmp_path / name, name, bits=4)
    prompt = [token + 30 for token in IDS]
    theirs, _ = load_mlx_lm(folder)
    expected = [token for token, _ in generate_step(mx.array(prompt), theirs, max_tokens=12)]
    model = load_model(folder)
    cache = model.make_cache(64, kv_bits=0)
    assert [token for token, _ in Run(model, prompt, cache, max_tokens=12)] == expected


def test_facts_without_tensors(tmp_path: Path) -> None:
    for name, bits in (("qwen3_next", 0), ("gpt_oss", 4)):
        folder = write_mlx_lm(tmp_path / name, name, bits)
        known = read_facts(json.loads((folder / "config.json").read_text()))
        assert isinstance(known, BridgedCheckpoint)
        plans: list[MemoryPlan] = [
            plan(facts, max_kv_size=300, device="cpu") for facts in (known, read_folder(folder))
        ]
        assert (plans[0].cache, plans[0].state) == (plans[1].cache, plans[1].state)
        # The converter leaves routers in other formats, which config.json says.
        assert plans[0].weights == pytest.approx(plans[1].weights, rel=0.02)


def test_the_commands(tmp_path: Path) -> None:
    folder = str(copy_folder("qwen3-next", tmp_path, tokenizer=True))
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{number % 60 + 2}" for number in range(45)))
    of_report = ["--tokens", "40", "--formats", "8g32,4g32", "--text", str(text)]
    for arguments, said in (
        (["plan", folder], ("state", "an estimate")),
        (["chat", "--model", folder, "-m", "5"], ("tokens were in the cache",)),
        (["report", "--model", folder, *of_report], ("the model is mlx-lm's",)),
    ):
        done = call(*arguments, stdin="w5 w6\nw7\n/stats\n/quit\n")
        assert done.returncode == 0, done.stderr
        assert all(words in done.stdout + done.stderr for words in said)
    ways = {
        row["model_type"]: row["way"]
        for row in json.loads(call("models", "--architectures", "--json").stdout)
    }
    assert (ways["llama"], ways["gpt_oss"], ways["olmo"]) == ("native", "bridged", "refused")


def test_the_engines_of_bench(tmp_path: Path) -> None:
    folder = write_mlx_lm(tmp_path / "model", "gpt_oss")
    ours = Kvant(EngineSpec("kvant", 0, None), folder, 512)
    theirs = MLXLM(EngineSpec("mlx-lm", 0, None), folder, 512)
    prompt: list[Any] = [token + 30 for token in IDS]
    first = list(ours.tokens(prompt, 10))[:10]
    assert first == list(theirs.tokens(prompt, 10))[:10]
    assert ours.weight_bytes == (theirs.weight_bytes[0], ours.weight_bytes[1])
    assert ours.weight_bytes[1] < ours.weight_bytes[0]  # half of the experts are not read
    assert ours.cache_size()[1] == theirs.cache_size()[1] == len(prompt) + 10
    assert ours.dtype == theirs.dtype == "float32"


def _say_tied(folder: Path, said: bool | None) -> None:
    """Let config.json, and its part for text, say whether the head is tied, or nothing of it."""
    raw = json.loads((folder / "config.json").read_text())
    for holder in (raw, raw.get("text_config")):
        if isinstance(holder, dict):
            holder.pop("tie_word_embeddings", None)
            holder |= {} if said is None else {"tie_word_embeddings": said}
    write_config(folder, raw)


# Classes that tie by default and do not, that sanitize in several ways, and with a part for text.
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        *(
            (name, 0)
            for name in ("granite", "qwen3_next", "mixtral", "bailing_moe", "gemma3_text", "qwen3_5", "jamba")
        ),
        *((name, 4) for name in ("qwen3_next", "qwen3_5", "gemma3_text")),
    ],
)
def test_a_head_that_differs_is_used_though_config_json_ties_it(tmp_path: Path, name: str, bits: int) -> None:
    folder = write_mlx_lm(tmp_path / "model", name, bits)
    _say_tied(folder, False)
    expected = load_model(folder)(mx.array([IDS]))
    _say_tied(folder, None)
    assert mx.array_equal(load_model(folder)(mx.array([IDS])), expected)
    _say_tied(folder, True)
    with pytest.warns(UserWarning, match=r"has a different .*lm_head\.weight"):
        model = load_model(folder)
    with pytest.warns(UserWarning, match=r"has a different .*lm_head\.weight"):
        planned = plan(read_folder(folder), max_kv_size=8, device="cpu")
    assert mx.array_equal(model(mx.array([IDS])), expected)
    assert planned.weights == model.nbytes


@pytest.mark.parametrize("name", ["qwen3_next", "granite"])
def test_a_copy_of_the_embedding_and_a_head_alone(tmp_path: Path, name: str) -> None:
    folder = write_mlx_lm(tmp_path / "model", name)
    weights = folder / "model.safetensors"
    embedding = mx.array(mx.load(str(weights))["model.embed_tokens.weight"])
    mx.eval(embedding)
    _say_tied(folder, True)
    change_tensors(weights, {"lm_head.weight": None})
    tied = load_model(folder)
    expected = tied(mx.array([IDS]))
    for changes in ({"lm_head.weight": embedding}, {"model.embed_tokens.weight": None}):
        change_tensors(weights, changes)
        model = load_model(folder)
        assert mx.array_equal(model(mx.array([IDS])), expected)
        assert model.nbytes == tied.nbytes
