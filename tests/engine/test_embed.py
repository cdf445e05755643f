"""Vectors of texts against sentence-transformers' and mlx-lm's, in any company and through any cache."""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.bridged import LONG, bridged, write_mlx_lm
from support.numbers import relative_error
from support.tokenizers_made import loaded, write_tokenizer
from transformers import AutoTokenizer

import kvant
from kvant import embed
from kvant.cache import CacheOptions
from kvant.engine.embedding import EmbeddingRequest, EmbeddingState
from kvant.engine.load import load_model
from kvant.engine.request import Request, Token
from kvant.engine.scheduler import Scheduler
from kvant.errors import ArgumentError, ContextError, KvantError, ModelError, PromptError
from kvant.models import Decoder
from kvant.text.pooling import Pooling, choose_pooling
from kvant.tools.convert.convert import convert_folder
from kvant.tools.convert.weight_format import WeightFormat

GOLDEN = Path(__file__).parents[1] / "data" / "embeddings"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
TEXTS: list[str] = json.loads((GOLDEN / "texts.json").read_text())["texts"]
# Of the largest number of a vector: float32, and keys and values of so many bits. Rounding in a batch is far
# below the first; a token of padding, or of another text, that is read would be far above all.
TOLERANCES = {0: 1e-4, 8: 0.03, 4: 0.3}
ALONE = 1e-5
NO_FILES: Any = SimpleNamespace(folder=None)  # in place of a tokenizer, for token ids
# Append only; windows; sinks; a state; latent attention; rows that layers share; a state beside keys.
KINDS = ["qwen3", "gemma3_text", "gpt_oss", "qwen3_next", "deepseek_v32", "falcon_h1"]
ONE_AT_A_TIME = ["llama4", "gemma2"]
ROWS = [LONG[:5], LONG[7:40], LONG[3:4], LONG[:200], LONG[1:6]]


def _expected(name: str) -> mx.array:
    return mx.array(np.load(GOLDEN / name / "vectors.npy"))


@pytest.fixture(scope="module", params=NAMES)
def golden(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    """A name, and its model and tokenizer."""
    return request.param, *_load(GOLDEN / request.param)


def _load(folder: Path) -> Any:
    """A model and its tokenizer. Of kvant's own architectures the head that is missing is said."""
    with nullcontext() if folder.name == "gemma3" else pytest.warns(UserWarning, match="no output head"):
        return kvant.load(folder)


def test_vectors_are_those_of_sentence_transformers(golden: Any) -> None:
    name, model, tokenizer = golden
    vectors = embed(model, tokenizer, TEXTS)
    assert vectors.dtype == mx.float32
    assert relative_error(vectors, _expected(name)) < TOLERANCES[0]


@pytest.mark.parametrize(
    "options", [{"batch_size": 1}, {"batch_size": 2}, {"prefill_step_size": 8}, {"prefill_step_size": 1}]
)
def test_company_changes_no_vector(golden: Any, options: dict[str, int]) -> None:
    """In another order, in other batches and chunks, with padding of any length and none."""
    _, model, tokenizer = golden
    together = embed(model, tokenizer, TEXTS)
    order = [3, 0, 4, 2, 1]
    others = embed(model, tokenizer, [TEXTS[number] for number in order], **options)
    assert relative_error(others, together[mx.array(order)]) < ALONE
    for number in (0, 3):
        assert relative_error(embed(model, tokenizer, [TEXTS[number]]), together[number : number + 1]) < ALONE


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_caches(golden: Any, bits: int) -> None:
    name, model, tokenizer = golden
    given = embed(model, tokenizer, TEXTS, kv_bits=bits, kv_group_size=16)
    error = relative_error(given, _expected(name))
    assert ALONE < error < TOLERANCES[bits]


def test_dimensions(golden: Any) -> None:
    """The first numbers of each vector, with length 1 again where the model's have that."""
    name, model, tokenizer = golden
    whole = _expected(name)
    short = embed(model, tokenizer, TEXTS, dimensions=5)
    expected = whole[:, :5]
    if name != "gemma3":
        expected = expected / mx.linalg.norm(expected, axis=-1, keepdims=True)
    assert relative_error(short, expected) < TOLERANCES[0]
    width = whole.shape[1]
    with pytest.raises(ArgumentError, match=f"dimensions is {width + 1}; the model's vectors have {width}"):
        embed(model, tokenizer, TEXTS, dimensions=width + 1)


def test_the_tokens_of_a_text(golden: Any) -> None:
    """As transformers has them, with Qwen3-Embedding's token at the end."""
    name, _, tokenizer = golden
    theirs = AutoTokenizer.from_pretrained(GOLDEN / name)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_the_tokenizer_of_qwen3_embedding(tmp_path: Path, kind: str) -> None:
    """transformers builds a pipeline of its own for the class that it declares, and keeps the end."""
    folder = write_tokenizer(tmp_path, "qwen2")
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    raw = json.loads((folder / "tokenizer.json").read_text())
    golden = json.loads((GOLDEN / "qwen3" / "tokenizer.json").read_text())["post_processor"]
    (folder / "tokenizer.json").write_text(json.dumps(raw | {"post_processor": golden}))
    theirs, ours = AutoTokenizer.from_pretrained(folder), loaded(folder)
    for text in (*TEXTS, ""):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode(text)[-1] == ours.pad_token_id != ours.eos_token_id


def test_quantized_weights(tmp_path: Path) -> None:
    """Of a folder that kvant converts, which keeps the files that say how it pools."""
    with pytest.warns(UserWarning, match="no output head"):
        convert_folder(GOLDEN / "mistral", tmp_path / "small", WeightFormat.choose(8, 32))
    given = embed(*kvant.load(tmp_path / "small"), TEXTS)
    assert ALONE < relative_error(given, _expected("mistral")) < TOLERANCES[8]


def _pooled(states: mx.array, kind: str) -> mx.array:
    """(1, S, hidden) states of a text alone -> (1, hidden), by NumPy in float64."""
    found = np.array(states.astype(mx.float32), np.float64)[0]
    vector = found[-1] if kind == "last" else found.mean(axis=0)
    return mx.array((vector / np.linalg.norm(vector))[None].astype(np.float32))


def _backbone(module: Any) -> Any:
    return module.language_model.model if hasattr(module, "language_model") else module.model


@pytest.mark.parametrize("kind", ["last", "mean"])
@pytest.mark.parametrize("name", [*KINDS, *ONE_AT_A_TIME])
def test_bridged_models(name: str, kind: Any) -> None:
    """The states that mlx-lm's own model has before its head, of each text alone and without a cache."""
    model = bridged(name)
    vectors = embed(model, NO_FILES, ROWS, pooling=kind, prefill_step_size=64)
    for row, vector in zip(ROWS, vectors, strict=True):
        states = _backbone(model.module)(mx.array([row]))
        assert relative_error(vector[None], _pooled(states, kind)) < 1e-3


def test_bridged_quantized_weights(tmp_path: Path) -> None:
    folder = write_mlx_lm(tmp_path / "model", "gemma3_text", bits=8)
    model = load_model(folder)
    (vector,) = embed(model, NO_FILES, ROWS[1:2], pooling="last")
    states = _backbone(model.module)(mx.array([ROWS[1]]))
    assert relative_error(vector[None], _pooled(states, "last")) < 1e-3


def test_a_model_without_files(pocket: Any) -> None:
    """Pooling has to be given; vectors have length 1 then."""
    with pytest.raises(ArgumentError, match=r"pooling is not given, and the model has no modules\.json"):
        embed(*pocket, TEXTS)
    model: Decoder = pocket[0]
    for kind in ("last", "mean"):
        vectors = embed(*pocket, TEXTS, pooling=kind)
        for text, vector in zip(TEXTS, vectors, strict=True):
            states = model.hidden_states(mx.array([pocket[1].encode(text)]))
            assert relative_error(vector[None], _pooled(states, kind)) < TOLERANCES[0]


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ("a text", {}, ArgumentError, "texts is a str; expected a list of texts"),
    (["a"], {"pooling": "max"}, ArgumentError, "pooling is 'max'; expected 'last' or 'mean'"),
    (["a"], {"dimensions": 0}, ValueError, "dimensions is 0"),
    (["a"], {"batch_size": 0}, ValueError, "batch_size is 0"),
    (["a", "x " * 3000], {}, ContextError, r"texts\[1\]: the text has 6000 tokens; expected at most 2048"),
    (["a", ""], {}, PromptError, r"texts\[1\]: the prompt is empty"),
    ([[5, 99_999]], {}, PromptError, r"texts\[0\]: the prompt has token id 99999"),
    (["a"], {"kv_bits": 3}, ArgumentError, "kv_bits is 3"),
]


@pytest.mark.parametrize(("texts", "options", "kind", "words"), REFUSED)
def test_what_is_refused(
    pocket: Any, texts: Any, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        embed(*pocket, texts, **({"pooling": "last"} | options))


def test_no_texts(pocket: Any) -> None:
    assert embed(*pocket, [], pooling="last").shape == (0, 256)


MODULES = [{"type": f"sentence_transformers.models.{name}", "path": path} for name, path in (
    ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))]  # fmt: skip


def _write(folder: Path, **files: Any) -> Path:
    """The golden folder with other files, by their names without the ending; None: without one."""
    shutil.copytree(GOLDEN / "qwen3", folder)
    for name, content in files.items():
        path = folder / f"{name.replace('pooling', '1_Pooling/config')}.json"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


LAID_OUT: list[tuple[dict[str, Any], Pooling | None]] = [
    ({"modules": None}, None),
    ({"pooling": {"pooling_mode": "lasttoken"}}, Pooling("last")),
    ({"pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}}, Pooling("mean")),
    ({"pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}}, Pooling("first")),
    ({"modules": MODULES[:2]}, Pooling("last", normalizes=False)),
    ({"sentence_bert_config": {"max_seq_length": 9}}, Pooling("last", max_tokens=9)),
    (
        {"config_sentence_transformers": {"prompts": {"q": "Q: "}, "default_prompt_name": "q"}},
        Pooling("last", prompt="Q: "),
    ),
]


@pytest.mark.parametrize(("files", "expected"), LAID_OUT)
def test_how_folders_say_it(tmp_path: Path, files: dict[str, Any], expected: Pooling | None) -> None:
    folder = _write(tmp_path / "model", **{"sentence_bert_config": {}} | files)
    if expected is None:
        with pytest.raises(ArgumentError, match="pooling is not given"):
            choose_pooling(folder, None)
        assert choose_pooling(folder, "mean") == Pooling("mean")
        return
    assert choose_pooling(folder, None) == expected
    assert choose_pooling(folder, "mean").normalizes == expected.normalizes


NOT_COMPUTED: list[tuple[dict[str, Any], str]] = [
    (
        {"modules": [*MODULES, MODULES[0] | {"type": "x.Dense"}]},
        "the modules are Transformer, .* Dense; expected",
    ),
    ({"modules": "{}"}, "expected a list of objects"),
    ({"modules": "[[1]]"}, "expected a list of objects"),
    ({"modules": "["}, "not JSON"),
    (
        {"modules": [MODULES[0], MODULES[1] | {"path": "../1_Pooling"}]},
        r"the path of Pooling is '\.\./1_Pooling'",
    ),
    ({"pooling": None}, "1_Pooling/config.json: no such file"),
    ({"pooling": {"pooling_mode": "weightedmean"}}, "it pools by weightedmean; expected one of lasttoken"),
    (
        {"pooling": {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}},
        "it pools by pooling_mode_max",
    ),
    ({"pooling": {}}, "it pools by nothing"),
    ({"sentence_bert_config": {"do_lower_case": True}}, "do_lower_case is true"),
    ({"config_sentence_transformers": {"default_prompt_name": "q"}}, "default_prompt_name is 'q'"),
]


@pytest.mark.parametrize(("files", "words"), NOT_COMPUTED)
def test_folders_that_ask_for_something_else(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    folder = _write(tmp_path / "model", **files)
    with pytest.raises(ModelError, match=words):
        choose_pooling(folder, None)


@pytest.mark.parametrize("said", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_a_model_that_attends_in_both_directions(tmp_path: Path, said: dict[str, bool]) -> None:
    config = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
    with pytest.raises(ModelError, match="both directions"):
        choose_pooling(_write(tmp_path / "model", config=config | said), None)


Told = dict[Any, list[Token]]


def _scheduler(model: Any, **options: Any) -> tuple[Scheduler, Any]:
    pool = model.make_pool(4096, sequences=4, max_seq_len=1024, options=CacheOptions(kv_bits=0))
    return Scheduler(model, pool, **{"max_batch": 4} | options), pool


def _request(ids: Sequence[int], lengths: Sequence[int]) -> EmbeddingRequest:
    texts = [list(ids[number : number + length]) for number, length in enumerate(lengths)]
    return EmbeddingRequest.of(texts, Pooling("mean"), None)


def test_nothing_of_a_text_is_kept(pocket: Any, heldout_ids: list[int]) -> None:
    """Its pages are free, and a prompt that begins alike finds nothing of it."""
    scheduler, pool = _scheduler(pocket[0])
    request = _request(heldout_ids, [300, 300, 5])
    assert len([token for token in scheduler.answer([request]) if token.embedding is not None]) == 3
    assert pool.num_free == pool.num_pages
    assert pool.num_sequences == 0
    (token,) = scheduler.answer([Request(heldout_ids[:300], max_tokens=1)])
    assert token.cached_tokens == 0


def test_a_running_answer_gets_a_token_after_every_chunk(
    pocket: Any, heldout_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 128 tokens at most, padding included; and the answer is the one that it is alone."""
    model = pocket[0]
    (alone, *_) = [_tokens(_scheduler(model)[0], [Request(heldout_ids[:9], max_tokens=40)])]
    scheduler, _ = _scheduler(model)
    answer = Request(heldout_ids[:9], max_tokens=40)
    scheduler.submit(answer)
    (first,) = scheduler.step()
    fed: list[int] = []
    feed = EmbeddingState.feed

    def counted(self: EmbeddingState, *given: Any) -> None:
        before = sum(sequence.length for sequence in self.sequences)
        sequences = list(self.sequences)
        feed(self, *given)
        fed.append(max(sequence.length for sequence in sequences) * len(sequences) - before)

    monkeypatch.setattr(EmbeddingState, "feed", counted)
    scheduler.submit(_request(heldout_ids, [700, 300, 60, 60, 60, 5, 9]))
    tokens = [first.token]
    vectors = 0
    while len(tokens) < 40:
        fed.clear()
        found = scheduler.step()
        assert sum(fed) <= 128
        (token,) = [each for each in found if each.request is answer]
        tokens.append(token.token)
        vectors += sum(each.embedding is not None for each in found)
    assert vectors == 7
    assert tokens == alone


def _tokens(scheduler: Scheduler, requests: list[Request]) -> list[int | None]:
    return [token.token for token in scheduler.answer(requests)]


def test_others_have_their_turn_between_texts(pocket: Any, heldout_ids: list[int]) -> None:
    """A prompt that came after many texts does not wait for the last of them."""
    scheduler, _ = _scheduler(pocket[0])
    texts = _request(heldout_ids, [400] * 12)
    prompt = Request(heldout_ids[:20], max_tokens=1)
    ended = [token.request for token in scheduler.answer([texts, prompt])]
    assert ended.index(prompt) < 3


def test_texts_that_do_not_fit_beside_answers_wait_in_part(pocket: Any, heldout_ids: list[int]) -> None:
    """Three of four sequences answer: texts are fed one by one meanwhile."""
    scheduler, pool = _scheduler(pocket[0])
    for start in range(3):
        scheduler.submit(Request(heldout_ids[start : start + 9], max_tokens=60))
    while pool.num_sequences < 3:
        scheduler.step()
    texts = _request(heldout_ids, [9, 9, 9, 9, 9])
    scheduler.submit(texts)
    vectors: list[Token] = []
    while len(vectors) < 5:
        vectors += [token for token in scheduler.step() if token.embedding is not None]
        assert pool.num_sequences <= 4
    assert not scheduler.idle
    assert {token.finish_reason for token in vectors} == {"stop"}


def test_cancelling(pocket: Any, heldout_ids: list[int]) -> None:
    """One text, and all."""
    scheduler, pool = _scheduler(pocket[0])
    texts = _request(heldout_ids, [600, 600, 600])
    scheduler.submit(texts)
    scheduler.cancel(texts, 1)
    found: list[Token] = []
    while not found or found[-1].embedding is None:
        found += scheduler.step()
    scheduler.cancel(texts)
    while not scheduler.idle:
        found += scheduler.step()
    reasons = {token.answer: token.finish_reason for token in found}
    assert sorted(reasons.values()) == ["cancelled", "cancelled", "stop"]
    assert reasons[1] == "cancelled"
    assert pool.num_free == pool.num_pages


def test_deterministic(pocket: Any, heldout_ids: list[int]) -> None:
    """The very numbers of a text alone."""
    lengths = [300, 40, 200]

    def vectors(make: Callable[[], list[EmbeddingRequest]]) -> list[list[float]]:
        scheduler, _ = _scheduler(pocket[0], deterministic=True)
        scheduler.submit(Request(heldout_ids[:30], max_tokens=30))
        found = {}
        for token in scheduler.answer(make()):
            if token.embedding is not None:
                found[len(token.request.prompt), token.answer] = token.embedding.tolist()
        return [found[key] for key in sorted(found)]

    together = vectors(lambda: [_request(heldout_ids, lengths)])
    texts = _request(heldout_ids, lengths).texts
    for text, expected in zip(texts, together, strict=True):
        (alone,) = vectors(lambda text=text: [EmbeddingRequest.of([text], Pooling("mean"), None)])  # type: ignore[misc]
        assert alone == expected


def test_an_error_ends_its_texts_alone(
    pocket: Any, heldout_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, pool = _scheduler(pocket[0])

    def fail(*given: Any) -> mx.array:
        raise KvantError("no head")

    monkeypatch.setattr(Decoder, "every_hidden_state", fail)
    scheduler.submit(_request(heldout_ids, [9, 300]))
    answer = Request(heldout_ids[:9], max_tokens=3)
    scheduler.submit(answer)
    found: list[Token] = []
    while not scheduler.idle:
        found += scheduler.step()
    assert [str(token.error) for token in found if token.request is not answer] == ["no head"] * 2
    assert len([token for token in found if token.request is answer]) == 3
    assert pool.num_free == pool.num_pages
