"""Many prompts at once: mlx-lm's tokens on the same weights, and what each prompt gives alone."""

from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.generate import BatchResponse as TheirResponse
from mlx_lm.generate_utils import BatchStats as TheirStats
from support.conversations import QUESTIONS, asking, prompt_ids
from support.counts import count

import kvant
from kvant import batch_generate
from kvant.engine.batch_generate import BatchResponse, BatchStats
from kvant.errors import ContextError, PromptError
from kvant.models import Decoder
from kvant.sample_utils import make_logits_processors, make_sampler
from kvant.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("without_compilation")
Pocket = tuple[Decoder, Tokenizer]
MIXED = make_sampler(temp=0.8, top_p=0.9, seed=2**64 - 2)


@pytest.fixture
def prompts(pocket: Pocket) -> list[list[int]]:
    """Of different lengths, one longer than a page."""
    plain = [prompt_ids(pocket[1], [asking(question)]) for question in QUESTIONS]
    long = pocket[1].encode("The fox Pip lived in a den by the river. " * 16)
    return [*plain[:2], long, *plain[2:]]


def test_names_are_mlx_lms() -> None:
    ours = signature(batch_generate).parameters
    assert list(ours)[:9] == list(signature(mlx_lm.batch_generate).parameters)[:9]
    further = {*signature(BatchGenerator.__init__).parameters} - {"self", "model", "max_tokens"}
    assert further <= {*ours}
    for theirs, own in ((TheirResponse, BatchResponse), (TheirStats, BatchStats)):
        assert {field.name for field in fields(theirs)} <= {field.name for field in fields(own)}
    names = [name for name in vars(TheirStats) if isinstance(vars(TheirStats)[name], property)]
    names += [
        name
        for name in vars(TheirStats.__mro__[1])
        if isinstance(vars(TheirStats.__mro__[1])[name], property)
    ]
    assert len(names) == 5
    stats = {
        "prompt_tokens": 10,
        "prompt_time": 2.0,
        "generation_tokens": 30,
        "decode_time": 3.0,
        "wall_time": 6.0,
    }
    for made in (stats, {}):
        assert [getattr(BatchStats(**made), name) for name in names] == [  # type: ignore[arg-type]
            getattr(TheirStats(**made), name) for name in names
        ]


@pytest.mark.parametrize("at_once", count([3], [1, 2, 3, 32]))
def test_tokens_are_mlx_lms(
    pocket: Pocket, pocket_mlx_lm: Any, pocket_folder: Path, prompts: list[list[int]], at_once: int
) -> None:
    _, their_tokenizer = mlx_lm.load(str(pocket_folder), lazy=True)
    given: dict[str, Any] = {
        "max_tokens": [40, 7, 20, 1, 30, 12],
        "return_token_ids": True,
        "return_logprobs": True,
    }
    given |= {"completion_batch_size": at_once, "prefill_batch_size": 1}
    theirs = mlx_lm.batch_generate(pocket_mlx_lm, their_tokenizer, prompts, **given)
    ours = batch_generate(*pocket, prompts, kv_bits=0, **given)
    assert ours.token_ids == theirs.token_ids
    assert ours.texts == theirs.texts
    assert ours.caches is None
    assert ours.logprobs is not None
    for own, their in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert own == pytest.approx(their, abs=1e-4)
    assert ours.stats.prompt_tokens == sum(map(len, prompts))
    assert ours.stats.generation_tokens == theirs.stats.generation_tokens
    assert 0 < ours.stats.prompt_time + ours.stats.decode_time <= ours.stats.wall_time
    assert ours.stats.peak_memory > 0
    # Prompts with their answers, in whole pages, and tables of the bias split.
    pages = sorted(-(-(len(p) + n) // 128) for p, n in zip(prompts, given["max_tokens"], strict=True))[
        -at_once:
    ]
    layers = pocket[0].make_cache(128, kv_bits=0, bias_split=False)
    page = sum(array.nbytes for layer in layers for array in layer.layer.arrays)
    assert 0 <= ours.stats.reserved_bytes - page * sum(pages) < 20_000


def _alone(pocket: Pocket, prompt: Any, max_tokens: int, **options: Any) -> list[int]:
    responses = list(kvant.stream_generate(*pocket, prompt, max_tokens, **options))
    tokens = [response.token for response in responses]
    return tokens[:-1] if responses[-1].finish_reason == "stop" else tokens


def test_each_prompt_gives_what_it_gives_alone(pocket: Pocket, prompts: list[list[int]]) -> None:
    texts: list[Any] = [*prompts[:3], "Once upon a time", mx.array(prompts[0])]
    listed = [None, *[make_sampler(temp=1, seed=5)] * 4]
    given: dict[str, Any] = {
        "kv_bits": 0,
        "logits_processors": make_logits_processors(repetition_penalty=1.2),
    }
    counted = [make_sampler(temp=0.8, top_p=0.9, seed=(2**64 - 2 + number) % 2**64) for number in range(5)]
    for options, samplers in (({"sampler": MIXED}, counted), ({"samplers": listed}, listed)):
        ours = batch_generate(*pocket, texts, max_tokens=12, return_token_ids=True, **options, **given)
        assert ours.token_ids == [
            _alone(pocket, p, 12, sampler=s, **given) for p, s in zip(texts, samplers, strict=True)
        ]


def test_a_seed_of_mlx_is_heeded(pocket: Pocket, prompts: list[list[int]]) -> None:
    made = []
    for seed in (7, 7, 8):
        mx.random.seed(seed)
        made.append(batch_generate(*pocket, prompts[:3], max_tokens=12, sampler=make_sampler(temp=1)).texts)
    assert made[0] == made[1] != made[2]


def test_deterministic_alone_and_in_company(pocket: Pocket, prompts: list[list[int]]) -> None:
    """Quantized values flip by the rounding of other rows; not here."""
    given: dict[str, Any] = {"deterministic": True, "max_tokens": 16, "return_logprobs": True}
    given |= {"completion_batch_size": 4, "prefill_batch_size": 1}
    together, alone = (batch_generate(*pocket, each, **given).logprobs for each in (prompts, prompts[2:3]))
    assert together is not None
    assert together[2:3] == alone


def test_what_ends_an_answer(pocket: Pocket, prompts: list[list[int]]) -> None:
    model, tokenizer = pocket
    prompts = prompts[:3]
    given: dict[str, Any] = {
        "kv_bits": 0,
        "max_tokens": 40,
        "return_token_ids": True,
        "return_prompt_caches": True,
    }
    plain = batch_generate(model, tokenizer, prompts, **given)
    assert plain.token_ids is not None
    stop = plain.texts[0][20:24]
    by_text = batch_generate(model, tokenizer, prompts, stop=[stop, "\0"], **given)
    assert by_text.texts == [text.partition(stop)[0] for text in plain.texts]
    row, single = plain.token_ids[0][10:12], plain.token_ids[2][5]
    by_tokens = batch_generate(model, tokenizer, prompts, stop_tokens=[row, [single]], **given)
    assert by_tokens.token_ids is not None
    assert by_tokens.token_ids[0] == plain.token_ids[0][: _first_end(plain.token_ids[0], row, single)]
    assert by_tokens.token_ids[2] == plain.token_ids[2][: plain.token_ids[2].index(single)]
    # An answer that its own text ended has its cache, too; with the token that ended it, and after one token.
    first = batch_generate(model, tokenizer, prompts, stop=plain.texts[0][0], **given)
    held = [cache.ids for made in (by_tokens, first) for cache in made.caches or () if cache is not None]
    assert held[0][:-1] == prompts[0] + by_tokens.token_ids[0]
    assert held[3] == [*prompts[0], plain.token_ids[0][0]]


def _first_end(tokens: list[int], row: list[int], single: int) -> int:
    ends = [at + 1 for at in range(len(tokens)) if tokens[at : at + 2] == row]
    return min([*ends, *(at for at, token in enumerate(tokens) if token == single)])


def test_caches_are_continued_and_kept(pocket: Pocket, prompts: list[list[int]], tmp_path: Path) -> None:
    """Each is one of its own, left as it is, and reserved for what its turn holds; one goes on from a
    file.
    """
    given: dict[str, Any] = {"kv_bits": 0, "max_tokens": 8, "return_token_ids": True}
    caches: Any = None
    held: list[list[int]] = [[], [], []]
    for turn in (0, 3, 1):
        new = [prompts[(turn + i) % len(prompts)] for i in range(3)]
        made = batch_generate(*pocket, new, prompt_caches=caches, return_prompt_caches=True, **given)
        assert made.token_ids == [_alone(pocket, [*held[i], *new[i]], 8, kv_bits=0) for i in range(3)]
        assert caches is None or [cache.ids for cache in caches] == held
        caches = made.caches
        assert caches is not None
        texts = [held[i] + new[i] + tokens for i, tokens in enumerate(made.token_ids)]
        held = [cache.ids for cache in caches]
        assert [ids[: len(text)] for ids, text in zip(held, texts, strict=True)] == texts
    caches[0].save(tmp_path / "cache")
    loaded = kvant.load_prompt_cache(tmp_path / "cache")
    made = batch_generate(*pocket, prompts[3:5], prompt_caches=[loaded, None], **given)
    alone = [_alone(pocket, ids, 8, kv_bits=0) for ids in ([*held[0], *prompts[3]], prompts[4])]
    assert made.token_ids == alone


def test_a_sequence_has_max_kv_size_at_most(pocket: Pocket, prompts: list[list[int]]) -> None:
    given: dict[str, Any] = {"kv_bits": 0, "return_token_ids": True, "stop_tokens": []}
    ours = batch_generate(*pocket, prompts[:2], max_tokens=30, max_kv_size=25, **given)
    assert ours.token_ids is not None
    assert [len(tokens) for tokens in ours.token_ids] == [25 + 1 - len(prompt) for prompt in prompts[:2]]
    with pytest.raises(ContextError, match=r"prompts\[2\]: the prompt has \d+ tokens; max_kv_size is 25"):
        batch_generate(*pocket, prompts, max_kv_size=25)


def test_what_is_printed(
    pocket: Pocket, prompts: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    batch_generate(*pocket, prompts[:3], max_tokens=3)
    assert capsys.readouterr() == ("", "")
    batch_generate(*pocket, prompts[:3], max_tokens=3, verbose=True)
    printed = capsys.readouterr().out
    assert "for 3 sequences at once" in printed
    assert "3/3" in printed


def test_no_prompt_is_no_work(pocket: Pocket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "make_pool", None)
    assert batch_generate(*pocket, [], return_token_ids=True) == BatchResponse(
        [], BatchStats(), None, [], None
    )


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"prompts": [[5], []]}, PromptError, r"prompts\[1\]: .* empty"),
    ({"max_tokens": [3]}, ValueError, "max_tokens has 1 entries; expected 2"),
    ({"prompt_caches": [None]}, ValueError, "prompt_caches has 1 entries; expected 2"),
    ({"stop_tokens": [2]}, ValueError, "stop_tokens has 2"),
    ({"completion_batch_size": 0}, ValueError, "completion_batch_size is 0"),
    (
        {"completion_batch_size": 10**9, "deterministic": True},
        ValueError,
        "completion_batch_size is 1000000000",
    ),
    ({"prefill_batch_size": 0}, ValueError, "prefill_batch_size is 0"),
    ({"prefill_step_size": 64, "deterministic": True}, ValueError, "prefill_step_size is 64; expected 128"),
    ({"max_kv_size": 0}, ValueError, "max_kv_size is 0"),
    ({"kv_bits": 5}, ValueError, "kv_bits is 5"),
    ({"stream": mx.default_stream(mx.cpu)}, ValueError, "stream is a Stream"),
    ({"input_embeddings": None}, TypeError, "input_embeddings"),
]


@pytest.mark.parametrize(("given", "kind", "words"), REFUSED)
def test_what_is_refused_by_name(
    pocket: Pocket, given: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        batch_generate(*pocket, **{"prompts": [[5, 6], [7]], **given})
