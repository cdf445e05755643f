"""A pipeline's logits are those of one process, bitwise: the ring on the loopback, layers dealt in several ways."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.checkpoints import qwen2_config, qwen3_moe_config, reference_model, save_checkpoint
from support.ranks import run_script

from kvant.models import Decoder, load_decoder

SIZES = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
# The last two layers have a window, which rank 0 has none of.
MIXED = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": qwen2_config(num_hidden_layers=4, **SIZES, **MIXED),
    "moe": qwen3_moe_config(num_hidden_layers=3, tie_word_embeddings=False),
}
TEXT = [(5 * i * i + 11 * i + 97) % 90 for i in range(160)]
# What every rank does with its part, and what one process does with the whole.
STEPS = """
from pathlib import Path
import kvant, sys
import mlx.core as mx

def steps(model, text):
    found = []
    for bits in (0, 8, 4):
        cache = model.make_cache(200, quant_bit=bits, quant_group=16)
        for first in range(0, 96, 48):
            mx.eval(model.feed(mx.array([text[first : first + 48]]), cache))
            cache.commit()
        for position in range(96, 110):
            found.append(model.next_logits(mx.array([text[position : position + 1]]), cache))
            mx.eval(found[-1])
            cache.commit()
        found.append(model(mx.array([text[110:114]]), cache=cache))
        mx.eval(found[-1])
        pool = model.make_pool(512, sequences=2, quant_bit=bits, quant_group=16)
        sequences = [pool.sequence(130) for _ in range(2)]
        for first, sequence in enumerate(sequences):
            batch = pool.batch([sequence])
            mx.eval(model.feed(mx.array([text[first : first + 60 + first]]), batch))
            batch.commit()
        batch = pool.batch(sequences)
        for position in range(60, 66):
            found.append(model.next_logits(mx.array([[text[position]], [text[position + 1]]]), batch))
            mx.eval(found[-1])
            batch.commit()
    return found
"""
SCRIPT = (
    STEPS
    + """
from kvant.ranks.group import connect
from kvant.ranks.stage import load_stage

ranks = connect("ring")
out, text = Path(sys.argv[1]), list(range(0))
exec(sys.argv[2])
for name, ends in deals.items():
    bounds = [0, *ends]
    own = range(bounds[ranks.rank], bounds[ranks.rank + 1])
    part = load_stage(out / name, ranks, own)
    before = ranks.traffic.messages
    found = steps(part, text)
    if ranks.rank == 0:
        mx.savez(str(out / f"{name}.npz"), **{str(i): each for i, each in enumerate(found)})
    assert len(part.layers) == len(own)
    print(name, ranks.traffic.messages - before, part.nbytes)
"""
)
# Of each model the layers up to which each rank goes.
DEALS = {2: {"qwen2": [1, 4], "moe": [2, 3]}, 3: {"qwen2": [2, 3, 4]}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        save_checkpoint(folder / name, config, reference_model(config))
    return folder


@pytest.fixture(scope="module")
def whole(models: Path) -> dict[str, tuple[Decoder, list[mx.array]]]:
    """Each model in one process, and its logits."""
    space: dict[str, Any] = {}
    exec(STEPS, space)
    loaded = {name: load_decoder(models / name) for name in MODELS}
    return {name: (model, space["steps"](model, TEXT)) for name, model in loaded.items()}


@pytest.mark.parametrize("count", DEALS)
def test_bitwise_the_logits_of_one_process(
    count: int, models: Path, whole: dict[str, tuple[Decoder, list[mx.array]]]
) -> None:
    deals = DEALS[count]
    outs = run_script(count, SCRIPT, str(models), f"deals, text = {deals}, {TEXT}")
    for name in deals:
        model, expected = whole[name]
        found = mx.load(str(models / f"{name}.npz"))
        assert isinstance(found, dict)
        assert len(found) == len(expected) > 50
        for number, each in enumerate(expected):
            assert mx.array_equal(found[str(number)], each), f"{name}: step {number}"
        lines = [{line.split()[0]: line.split()[1:] for line in out.splitlines()}[name] for out in outs]
        assert sum(int(nbytes) for _, nbytes in lines) == model.nbytes  # nothing is held twice
        fed, answered = 3 * (2 + 2), 3 * (15 + 6)
        ends, between = fed + 2 * answered, 2 * (fed + answered)
        assert [int(messages) for messages, _ in lines] == [ends, *[between] * (count - 2), ends]
