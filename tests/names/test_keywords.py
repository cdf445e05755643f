"""mlx-lm's keywords, each honoured or refused by its name, and its functions of sampling."""

import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.sample_utils as theirs
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import cache as mlx_lm_cache
from support.bridged import copy_folder
from support.tiny_models import build

import kvant
from kvant import generate, load, stream_generate
from kvant import sample_utils as ours
from kvant.engine.row_sampling import Row, sample_rows
from kvant.errors import ArgumentError
from kvant.models import Decoder

Pocket = tuple[Decoder, Any]
PROMPT = "Once upon a time"


def test_every_keyword_of_mlx_lm_is_there_in_its_order() -> None:
    theirs = list(signature(mlx_lm.load).parameters)
    assert list(signature(load).parameters) == [*theirs, "path_or_name", "weights", "mtp"]
    ours = signature(stream_generate).parameters
    assert list(ours)[:6] == list(signature(mlx_lm.stream_generate).parameters)[:6]
    steps = {*signature(generate_step).parameters, *signature(speculative_generate_step).parameters}
    assert len(steps) > 15
    assert steps <= {*ours}
    assert list(signature(generate).parameters)[:4] == list(signature(mlx_lm.generate).parameters)[:4]


LIBRARY = """
from kvant import generate, load, make_prompt_cache, sample_utils
model, tokenizer = load("pocket")
cache = make_prompt_cache(model, 64)
sampler, processors = sample_utils.make_sampler(0.7), sample_utils.make_logits_processors({1: 2.0}, 1.1)
generate(model, tokenizer, "Once", max_tokens=2, sampler=sampler, logits_processors=processors, prompt_cache=cache)
"""
COMMAND = """
from kvant.cli import main
sys.argv = ["kvant", "chat", "-q", "-m", "5", "--temp", "0.8", "--seed", "3"]
try:
    main()
except SystemExit as ended:
    assert not ended.code
"""
IMPORTED = """
print(sorted({name.partition(".")[0] for name in sys.modules} & {"mlx_lm", "transformers", "tokenizers", "numpy"}))
"""


@pytest.mark.parametrize("program", [LIBRARY, COMMAND])
def test_no_other_library_comes_along(program: str) -> None:
    command = [sys.executable, "-c", f"import sys{program}{IMPORTED}"]
    done = subprocess.run(command, input="Hello!\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


REFUSED_BY_LOAD: list[tuple[dict[str, Any], str]] = [
    ({"path_or_hf_repo": None}, "path_or_hf_repo is missing"),
    ({"path_or_hf_repo": "a", "path_or_name": "b"}, "path_or_hf_repo is given together with path_or_name"),
    ({"model_config": {"rope_theta": 1.0}}, "model_config has rope_theta"),
    ({"path_or_hf_repo": "pocket", "revision": "main"}, "revision is 'main'"),
    ({"trust_remote_code": True}, "trust_remote_code is True; nothing in a model folder is executed"),
    (
        {"tokenizer_config": {"trust_remote_code": True}},
        r"\['trust_remote_code'\] is True; nothing in a model",
    ),
    (
        {"tokenizer_config": {"padding_side": "left", "eos_token": "x"}},
        "tokenizer_config has padding_side; expected",
    ),
    ({"tokenizer_config": {"eos_token": 3}}, r"tokenizer_config\['eos_token'\] is 3; expected text"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED_BY_LOAD)
def test_load_refuses_before_it_looks_for_the_model(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(**{"path_or_hf_repo": "no/such-model"} | arguments)


def test_lazy_loads_and_says_that_it_did_it_at_once() -> None:
    with pytest.warns(UserWarning, match="lazy is True; every weight is read at load"):
        model, _ = load("pocket", lazy=True)
    assert model.nbytes


def test_an_end_of_text_token_of_ones_own(pocket_folder: Path) -> None:
    """The templates have it too, as mlx-lm's."""
    settings = {"eos_token": ".", "chat_template": "{{ messages[0].content }}{{ eos_token }}"}
    for each in (
        load("pocket", tokenizer_config=settings),
        mlx_lm.load(str(pocket_folder), tokenizer_config=settings),
    ):
        assert each[1].apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False) == "Hello."
    with pytest.raises(ArgumentError, match=r"\['eos_token'\] is 'no such token'; not in the vocabulary"):
        load("pocket", tokenizer_config={"eos_token": "no such token"})


@pytest.fixture
def folder(pocket_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pocket_folder, tmp_path / "model"))


def test_the_config_is_mlx_lms(folder: Path) -> None:
    for eos in (None, 3, [3, 5]):
        written = {} if eos is None else {"eos_token_id": eos, "temperature": 0.5}
        (folder / "generation_config.json").write_text(json.dumps(written))
        assert load(folder, return_config=True)[2] == mlx_lm.load(str(folder), return_config=True)[2]


def test_bits_shape_the_cache_that_is_reserved(pocket: Pocket, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = pocket
    made: list[Any] = []
    plain = Decoder.reserve_cache
    monkeypatch.setattr(
        Decoder, "reserve_cache", lambda *given, **own: made.append(plain(*given, **own)) or made[-1]
    )
    for options, expected in (
        ({}, (8, 32)),
        ({"kv_bits": None, "kv_group_size": None, "quantized_kv_start": None}, (8, 32)),
        ({"kv_bits": 4, "kv_group_size": 16, "quantized_kv_start": 0}, (4, 16)),
        ({"kv_bits": 0, "quantized_kv_start": 5000}, (0, 0)),
    ):
        assert generate(model, tokenizer, PROMPT, max_tokens=5, **options)  # type: ignore[arg-type]
        assert {(layer.layer.format.kv_bits, layer.layer.format.kv_group_size) for layer in made.pop()} == {
            expected
        }
    assert not made


REFUSED_BY_GENERATE: list[tuple[dict[str, Any], str]] = [
    (
        {"input_embeddings": mx.zeros((2, 4))},
        r"input_embeddings is \(2, 4\); expected \(\d+, 256\) for the prompt's",
    ),
    ({"input_embeddings": [[1.0]]}, r"input_embeddings is list; expected \(\d+, 256\)"),
    (
        {"input_embeddings": mx.zeros((2, 4)), "draft": "prompt"},
        "input_embeddings is given; expected None: drafts",
    ),
    ({"stream": mx.default_stream(mx.cpu)}, "stream is a Stream; expected None"),
    ({"kv_bits": 6}, "kv_bits is 6; expected 8, 4, or 0"),
    ({"quantized_kv_start": 5000}, "quantized_kv_start is 5000; a cache is quantized from the first token"),
    ({"kv_group_size": 0}, "kv_group_size is 0; expected a positive"),
    ({"kv_group_size": 48}, "48"),
    ({"max_kv_size": 0}, "max_kv_size is 0; expected at least 1"),
    ({"max_kv_size": 3}, r"the prompt has \d+ tokens; max_kv_size is 3"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED_BY_GENERATE)
def test_generate_refuses_before_it_computes(pocket: Pocket, options: dict[str, Any], message: str) -> None:
    def progress(done: int, total: int) -> None:
        raise AssertionError("the prompt is read")

    for function in (generate, stream_generate):
        with pytest.raises(ValueError, match=message):
            function(*pocket, PROMPT, prompt_progress_callback=progress, **options)


def test_options_beside_a_cache_can_only_confirm_it(pocket: Pocket) -> None:
    model, tokenizer = pocket

    def ask(cache: Any, **options: Any) -> str:
        return generate(model, tokenizer, PROMPT, max_tokens=3, prompt_cache=cache, **options)

    eight, none = (kvant.make_prompt_cache(model, 64, kv_bits=bits) for bits in (8, 0))
    four = kvant.make_prompt_cache(model, 64, kv_bits=4, kv_group_size=16)
    assert ask(eight, kv_bits=8, kv_group_size=32, max_kv_size=64)
    assert ask(four, kv_bits=4, kv_group_size=16)
    assert ask(none, kv_bits=0)
    for cache, options, message in (
        (eight, {"kv_bits": 4}, "kv_bits is 4; 8 is that of the prompt_cache"),
        (four, {"kv_group_size": 32}, "kv_group_size is 32; 16 is that of the prompt_cache"),
        (none, {"kv_bits": 8}, "kv_bits is 8; 0 is that of the prompt_cache"),
        (eight, {"max_kv_size": 65}, "max_kv_size is 65; 64 is that of the prompt_cache"),
    ):
        with pytest.raises(ArgumentError, match=message):
            ask(cache, **options)


def test_a_cache_of_either_kind_of_model(pocket: Pocket, tmp_path: Path) -> None:
    model, _ = pocket
    assert kvant.trim_prompt_cache([], 3) == 0
    own = kvant.make_prompt_cache(model, 50, kv_bits=4, kv_group_size=16)
    assert own.max_seq_len == 50
    assert own.nbytes == model.make_cache(50, kv_bits=4, kv_group_size=16).nbytes
    other, _ = build("qwen3")
    layers = kvant.make_prompt_cache(other)
    assert {layer.max_seq_len for layer in layers} == {4096}
    mx.eval(other(mx.array([[1, 2, 3]]), cache=layers))
    assert kvant.can_trim_prompt_cache(layers)
    assert kvant.trim_prompt_cache(layers, 2) == 2
    assert {layer.offset for layer in layers} == {1}
    # it is not saved, by mlx-lm neither
    for save in (kvant.save_prompt_cache, mlx_lm_cache.save_prompt_cache):
        with pytest.raises(ValueError, match="kvant"):
            save(str(tmp_path / "theirs.safetensors"), layers)
    mixed, _ = build("qwen3_next")  # it has states, which go back to nothing
    layers = kvant.make_prompt_cache(mixed, 64)
    mx.eval(mixed(mx.array([[1, 2, 3]]), cache=layers))
    assert not kvant.can_trim_prompt_cache(layers)
    assert kvant.trim_prompt_cache(layers, 2) == 0


def test_a_group_that_does_not_divide_a_bridged_models_width(tmp_path: Path) -> None:
    """There the greatest common divisor is used, and the group that was asked for is confirmed by it."""
    model, tokenizer = load(copy_folder("gemma3", tmp_path, tokenizer=True))
    cache = kvant.make_prompt_cache(model, 64, kv_group_size=48)
    assert {own.kv_group_size for own in cache.pool.formats} == {16}
    for options in ({"prompt_cache": cache, "kv_group_size": 48}, {"kv_group_size": 48}):
        responses = list(stream_generate(model, tokenizer, [3, 4, 5], 2, **options))  # type: ignore[arg-type]
        assert len(responses) == 2
    with pytest.raises(ArgumentError, match="kv_group_size is 32; 16 is that of the prompt_cache"):
        generate(model, tokenizer, [3], prompt_cache=cache, kv_group_size=32)


VOCAB = 50


def _logprobs(seed: int = 0, rows: int = 1) -> mx.array:
    logits = mx.random.normal((rows, VOCAB), key=mx.random.key(seed)) * 2
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def test_every_name_of_mlx_lm_with_its_arguments() -> None:
    public = [
        name
        for name, each in vars(theirs).items()
        if inspect.isfunction(each) and each.__module__ == theirs.__name__
    ]
    compiled = [name for name in vars(theirs) if name.startswith(("apply_", "categorical_"))]
    assert len({*public, *compiled}) == 11
    for name in {*public, *compiled}:
        assert name in ours.__all__
        function = getattr(theirs, name)
        expected = inspect.signature(getattr(function, "__wrapped__", function)).parameters
        given = inspect.signature(getattr(ours, name)).parameters
        assert [*given][: len(expected)] == [*expected], name
        for parameter, each in expected.items():
            default = {"repetition_penalty": None}.get(parameter, each.default)
            assert given[parameter].default == default, (name, parameter)
    assert kvant.sample_utils is ours


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(
            ("apply_top_p", (0.7,)),
            ("apply_min_p", (0.1,)),
            ("apply_top_k", (5,)),
            ("categorical_sampling", (0.8,)),
        ),
        *(("apply_xtc", (1.0, 0.1, [])), ("apply_xtc", (0.5, 0.05, [2, 9])), ("greedy_sampler", ())),
        *((f"make_{kind}_penalty", (1.7, 3)) for kind in ("repetition", "presence", "frequency")),
    ],
)
def test_functions_of_logits(name: str, arguments: tuple[Any, ...]) -> None:
    """Of one row or several, or of a vector, and with the same random numbers."""
    mx.disable_compile()  # a fused operation rounds differently
    try:
        for seed in range(5):
            for logprobs in (_logprobs(seed), _logprobs(seed, rows=3), _logprobs(seed)[0]):
                results = []
                for module in (theirs, ours):
                    mx.random.seed(seed)
                    function = getattr(module, name)
                    if name.endswith("_penalty"):
                        tokens = mx.array([3, 4, 3, 9, 9, 9, 30])
                        results.append(function(*arguments)(tokens, mx.array(logprobs.reshape(-1, VOCAB))))
                    else:
                        results.append(function(logprobs, *arguments))
                assert mx.array_equal(*results)
    finally:
        mx.enable_compile()
    assert results[0].size


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("apply_top_p", (0,), "top_p is 0; expected above 0"),
        ("apply_min_p", (0.1, VOCAB + 1), f"min_tokens_to_keep is {VOCAB + 1}; expected at most {VOCAB}"),
        ("apply_top_k", (VOCAB,), f"top_k is {VOCAB}; expected 1 to {VOCAB - 1} with this"),
        ("apply_xtc", (2, 0.1, []), "xtc_probability is 2; expected from 0 to 1"),
        ("apply_xtc", (1, 0.1, [VOCAB]), f"xtc_special_tokens has token {VOCAB}"),
    ],
)
def test_values_that_are_refused(name: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        getattr(ours, name)(_logprobs(), *arguments)
    with pytest.raises(ArgumentError, match="penalty is 0; expected above 0"):
        ours.make_repetition_penalty(0)


def test_the_nth_call_draws_as_at_position_n() -> None:
    sampler = ours.make_sampler(1.0, xtc_probability=0.4, xtc_threshold=0.05, seed=5)
    logprobs = _logprobs()
    at_positions = sample_rows(
        mx.repeat(logprobs, 40, axis=0), [Row(sampler, (), number, ()) for number in range(40)]
    )
    assert [sampler(logprobs).item() for _ in range(40)] == at_positions[0].tolist()


def _draw(pocket: Pocket, sampler: Any, loop: str) -> Iterator[int]:
    """A run of kvant's loop, or of mlx-lm's, which gives a sampler log-probabilities alone."""
    model, tokenizer = pocket
    prompt = tokenizer.encode("Once upon a time")
    if loop == "kvant":
        yield from (each.token for each in stream_generate(model, tokenizer, prompt, 25, sampler=sampler))
    else:
        cache = kvant.make_prompt_cache(model, 128)
        steps = generate_step(mx.array(prompt), model, max_tokens=25, sampler=sampler, prompt_cache=cache)
        yield from (int(token) for token, _ in steps)


def test_seeded_runs_of_mlx_lms_loop_give_interleaved_what_they_give_alone(pocket: Pocket) -> None:
    def run(seed: int) -> Iterator[int]:
        return _draw(pocket, ours.make_sampler(1.3, top_p=0.98, xtc_probability=0.3, seed=seed), "mlx-lm")

    alone = [list(run(seed)) for seed in (1, 2)]
    state = mx.random.state[0].tolist()  # type: ignore[index]
    assert [list(tokens) for tokens in zip(*zip(run(1), run(2), strict=True), strict=True)] == alone
    assert mx.random.state[0].tolist() == state  # type: ignore[index]
    assert alone[0] != alone[1]
    assert len(set(alone[0])) > 5


@pytest.mark.parametrize("loop", ["kvant", "mlx-lm"])
def test_without_a_seed_mlxs_own_makes_a_run_repeatable(pocket: Pocket, loop: str) -> None:
    sampler = ours.make_sampler(1.5, xtc_probability=0.5)
    runs = []
    for seed in (7, 7, 8):
        mx.random.seed(seed)
        runs.append(list(_draw(pocket, sampler, loop)))
    runs.append(list(_draw(pocket, sampler, loop)))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2] != runs[3]
