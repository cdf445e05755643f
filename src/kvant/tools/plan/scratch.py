"""An upper bound of what reading a chunk of a prompt takes beside the weights and the cache.

MLX's CPU back end allocates a result when its operation is queued and frees it when the last reader has run. It queues
about 100 entries ahead, two for most operations (mlx/transforms.cpp, mlx/backend/cpu/encoder.h). A layer has more
entries: at most one layer's arrays are held at once, and their sum is the bound. Two stretches of a layer that are
further apart than the queue is long are never held together; then the larger one counts. docs/memory-plan.md lists the
terms.

S new tokens, T cached tokens read, H query heads, K kv heads, D head_dim.
"""

from collections.abc import Sequence

from kvant.cache.window import SLACK
from kvant.models.config import ModelConfig
from kvant.models.experts import takes_turns
from kvant.models.matrix import DEQUANTIZED_ELEMENTS, PARALLEL_ELEMENTS, UNPACK_FROM_ELEMENTS, UNPACK_FROM_ROWS
from kvant.models.quantization import Quantization
from kvant.models.unpacked import UNPACKED_ELEMENTS
from kvant.operators.attention import GPU_FUSED_HEAD_DIMS
from kvant.operators.bias_split import MAX_SCORE_QUERIES
from kvant.operators.cpu_attention import BLOCK_SCORE_BYTES
from kvant.operators.exponential import ONE_BY_ONE
from kvant.operators.streams import FEW_ROWS, cpu_streams

FLOAT32 = 4  # bytes
# Measured: at most so many parts of a quantized matrix are held beside those at work, one a core (1 to 8 streams,
# matrices of 2 to 67 million numbers).
AHEAD = 4
# The same of parts that masks unpack, by bits: a part of 8-bit numbers takes half as many operations.
UNPACKED_AHEAD = {2: 4, 4: 4, 8: 8}
SCORES_OF_ONE = 2  # arrays of a block of scores that are held at once: themselves, and powers of e
SCORES_AHEAD = 6  # of several blocks
FEW_ROWS_AHEAD = 5  # and of those for a few rows of x, which are smaller and take fewer operations
# Bytes of a window's mask for each query and token: its terms and their product, and what blocks of queries add.
MASK_BYTES = 16


def scratch_bytes(
    config: ModelConfig,
    *,
    itemsize: int,
    on_cpu: bool,
    kv_bits: int,
    kv_group_size: int,
    pairs: int | None,
    adapted: bool,
    new: int,
    tokens: int,
    window: int | None = None,
    sequences: int | None = None,
) -> int:
    """The most bytes held beside the weights and the cache while S tokens are read, the last of them token T.

    Args:
        config: of the model.
        itemsize: bytes of a number of the compute dtype.
        on_cpu: quantized matrices are dequantized, and attention makes scores.
        kv_bits: 8, 4 or 0.
        kv_group_size: elements that share a scale.
        pairs: rotary pairs a layer whose key bias is split off; None: the cache splits nothing off.
        adapted: an adapter's products are added to those of quantized matrices.
        new: S.
        tokens: T.
        window: the last tokens that the layer's queries see; None: all.
        sequences: of a pool that take part in the step, S and T each; None: a cache of one sequence.
    """
    paged, sequences = sequences is not None, sequences or 1
    rows = new * sequences
    hidden = config.hidden_size
    Q, KV = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    dequantized = on_cpu and config.quantization is not None
    made = 1 + dequantized + adapted  # a product is made in parts, joined, and added to an adapter's

    # Numbers for each new token. A norm makes the square and the result, rotation two halves of both kinds.
    qkv = 3 * hidden + made * (Q + 2 * KV) + 2 * (Q + KV) * (1 + config.query_key_norm)
    append = 2 * KV * (4 if kv_bits else 1)  # joined; with bits also their magnitudes, quotients and quantized values
    attention = (Q + KV) + 3 * Q + (made + 1) * hidden  # rotated; outputs of blocks, joined, transposed; o_proj; sum
    mlp = 3 * hidden + _mlp(config, made, sigmoid=not (on_cpu and ONE_BY_ONE))  # norm

    windowed = window is not None and window < tokens
    if windowed and window is not None:  # the rows of its ring and the new ones
        tokens = min(tokens, window + SLACK + new)
    before, after = (numbers * rows * itemsize for numbers in (qkv + append, mlp))
    scores = _score_bytes(config, on_cpu, new, tokens)
    if pairs and new <= MAX_SCORE_QUERIES:
        scores *= 3  # the scores of the keys' bias, and the same masked
    scores *= sequences
    cached = 2 * KV * tokens * sequences  # numbers
    between = attention * rows * FLOAT32 + scores
    if kv_bits:
        between += cached * FLOAT32 + cached // kv_group_size * FLOAT32  # dequantized, with their scales
        if itemsize != FLOAT32:
            between += cached * itemsize
    if kv_bits == 4:
        between += cached * 2  # unpacked to a byte each, then made signed
    if paged or (on_cpu and kv_bits and new == 1):  # copied side by side
        between += cached * (kv_bits or 8 * itemsize) // 8
    if paged and not kv_bits:  # a sequence's part of what was joined, for its product
        between += 2 * KV * tokens * itemsize
    if not on_cpu and pairs is not None and itemsize != FLOAT32:
        between += cached * FLOAT32
    if windowed:
        # The rows of the ring beside the new ones; the mask in the making.
        row = 2 * KV * (kv_bits or 8 * itemsize) // 8 + 2 * KV // kv_group_size * 2
        between += tokens * row + MASK_BYTES * new * tokens
    if pairs and new > MAX_SCORE_QUERIES:
        between += cached // 2 * FLOAT32  # the keys with their bias
    experts, ended = config.experts, 0
    if on_cpu and experts is not None and takes_turns(rows * experts.per_token, experts.count):
        # The last forms of a layer's rows, joined, in order, times their shares, may be held while the next begins.
        ended = 3 * rows * experts.per_token * hidden * itemsize
    # o_proj and gate_up take longer than the queue is. The choice of experts is waited for.
    if dequantized and 2 * config.intermediate_size * hidden <= 2 * DEQUANTIZED_ELEMENTS and not ended:
        return before + between + after + _dequantized(config, rows, sequences)  # the queue is as long as a layer
    if dequantized or (ended and experts is not None and all(experts.layers)):
        return max(ended + before + between, after) + (_dequantized(config, rows, sequences) if dequantized else 0)
    return before + between + after


def _mlp(config: ModelConfig, made: int, sigmoid: bool) -> int:
    """Numbers for each new token in an MLP, or in the experts that it goes through; the larger where both are there.

    ``sigmoid``: the gate's is an array of its own.
    """
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.experts
    mlp = made * (2 * inner + hidden) + sigmoid * inner  # gate and up, down
    if experts is None or not any(experts.layers):
        return mlp
    # For each expert of a token: its row, as for an MLP, outputs joined, back in order, times their shares; the order.
    row = hidden + made * (2 * experts.inner_size + hidden) + experts.inner_size + 3 * hidden + 8
    routed = 4 * experts.count + experts.per_token * row + hidden
    return routed if all(experts.layers) else max(mlp, routed)


def _score_bytes(config: ModelConfig, on_cpu: bool, new: int, tokens: int) -> int:
    """Bytes of the attention's scores that are held."""
    query_bytes = config.num_attention_heads * tokens * FLOAT32
    if not on_cpu:
        return 0 if config.head_dim in GPU_FUSED_HEAD_DIMS else new * query_bytes
    block = max(1, min(new, BLOCK_SCORE_BYTES // query_bytes))
    of_one = new if new <= FEW_ROWS else SCORES_OF_ONE * new
    return min(of_one, SCORES_AHEAD * block) * query_bytes


def _dequantized(config: ModelConfig, rows: int, last: int) -> int:
    """Bytes of the floating-point weights made of quantized matrices that are held, and of unpacking them.

    The queue has room for parts of a layer's matrices or for those of the head, which sees the ``last`` rows.
    """
    assert config.quantization is not None
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.experts
    Q, KV = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    attention, mlp = [(Q + 2 * KV) * hidden, Q * hidden], [2 * inner * hidden, inner * hidden]
    head = _unpacked(config.quantization, [config.vocab_size * hidden], last)
    if experts is None or not any(experts.layers):
        return max(head, _unpacked(config.quantization, attention + mlp, rows))
    largest = 2 * experts.inner_size * hidden
    at_work = 1 if largest >= PARALLEL_ELEMENTS else len(cpu_streams())  # an expert for all cores, or one for each
    expert = _unpacked(config.quantization, [largest, largest // 2], rows)
    dense = attention if all(experts.layers) else attention + mlp
    return max(head, _unpacked(config.quantization, dense, rows), at_work * expert)


def _unpacked(quantization: Quantization, matrices: Sequence[int], rows: int) -> int:
    """The same of matrices of so many numbers, one after the other, for so many rows of x."""
    if rows < UNPACK_FROM_ROWS:
        matrices = [m for m in matrices if _by_masks(quantization) and m >= UNPACK_FROM_ELEMENTS]
        if not matrices:
            return 0
    matrices = sorted(matrices)
    ahead, elements, at_once = AHEAD, DEQUANTIZED_ELEMENTS, len(matrices)
    if not quantization.has_biases:  # small floats, looked up
        unpacking = 5 if quantization.bits == 4 else 1
    elif not _by_masks(quantization):  # a word for every bit
        unpacking = FLOAT32 * quantization.bits
    else:  # the bytes with the numbers at one place, and these as floats
        unpacking = int(quantization.bits < 8)
        if rows <= FEW_ROWS:
            ahead, elements = FEW_ROWS_AHEAD, UNPACKED_ELEMENTS
        else:
            ahead, at_once = UNPACKED_AHEAD[quantization.bits], 2
    streams = len(cpu_streams()) if matrices[-1] >= PARALLEL_ELEMENTS else 1
    part = min(elements, -(-matrices[-1] // streams))
    return (FLOAT32 + unpacking) * min(sum(matrices[-at_once:]), (streams + ahead) * part)


def _by_masks(quantization: Quantization) -> bool:
    return quantization.has_biases and 8 % quantization.bits == 0
