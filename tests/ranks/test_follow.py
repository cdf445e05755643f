"""A thousand tokens over several ranks: rank 0 draws them, and every rank has the same, in a run and in an engine.

Drafts are rank 0's too: what it accepted is what every rank counts, and the text is that of one process without any.
"""

import json
from pathlib import Path

from support.checkpoints import qwen2_config, reference_model, save_checkpoint
from support.counts import count
from support.ranks import run_script

from kvant.engine.run import Run
from kvant.models import load_decoder
from kvant.sample_utils import make_sampler

TOKENS = count(300, 1000)
SCRIPT = """
import json, os, sys
from pathlib import Path
import kvant
sys.path.insert(0, sys.argv[4])
from support.drafts import KnownDrafts
from kvant.engine.batch_engine import BatchEngine
from kvant.engine.drafted_run import DraftedRun
from kvant.engine.drafting.drafts import Drafts
from kvant.engine.request import Request
from kvant.engine.run import Run
from kvant.models import load_decoder
from kvant.ranks.environment import find_place
from kvant.ranks.follow import Follower
from kvant.ranks.group import connect
from kvant.ranks.guard import Ended, Guard
from kvant.ranks.lead import Lead
from kvant.ranks.stage import load_stage
from kvant.ranks.tensor import load_tensor
from kvant.sample_utils import make_sampler

POOL, RUN = 0, 1  # numbers of what rank 0 makes
folder, number = Path(sys.argv[1]), int(sys.argv[2])
place = find_place(os.environ)
guard = Guard.join(place, {})
ranks = connect(place.backend)

def load(parallel):
    if parallel == "tensor":
        return load_tensor(folder, ranks)
    return load_stage(folder, ranks, range(ranks.rank, ranks.rank + 1))

def drafted(lead, whole, bits):  # the text of several ranks with drafts, and of one process without
    prompt, options = [1, 2, 3] * 8, {"max_tokens": 40, "sampler": make_sampler(temp=1.0, seed=bits)}
    alone = whole.make_cache(90, quant_bit=bits, quant_group=16)
    text = [token for token, _ in Run(whole, prompt, alone, **options)]
    cache = lead.make_cache(90, quant_bit=bits, quant_group=16)
    run = DraftedRun(lead, prompt, cache, drafts=KnownDrafts(text=[*prompt, *text], seed=bits), **options)
    tokens, counts = [token for token, _ in run], run.drafts
    assert cache.ids[0] == [*prompt, *tokens[:-1]]
    assert 0 < counts.accepted < counts.drafted and counts.steps < 32, counts
    measured = DraftedRun(lead, prompt, lead.make_cache(90), drafts=Drafts(), max_tokens=40)  # by rank 0's clock
    assert len(list(measured)) == 40
    return [text, tokens]

part = load(sys.argv[3])
if ranks.rank == 0:
    lead = Lead(part, ranks, guard)
    # The engine first: MLX aborts a process that exits right after another thread of it which computed.
    pool = lead.make_pool(3 * number, sequences=2, quant_bit=8, quant_group=16)
    with BatchEngine(lead, pool, max_batch=2) as engine:
        wanted = [
            Request([4, 5, 6 + seed], max_tokens=number // 2, sampler=make_sampler(temp=1.0, seed=seed))
            for seed in (1, 2)
        ]
        answers = [engine.submit(request) for request in wanted]
        print(json.dumps([[token.token for token in each] for each in answers]))
    cache = lead.make_cache(number + 10, quant_bit=8, quant_group=16)
    run = Run(lead, [1, 2, 3], cache, max_tokens=number, sampler=make_sampler(temp=1.0, seed=5))
    print(json.dumps([token for token, _ in run]))
    whole = load_decoder(folder)
    texts = [drafted(lead, whole, bits) for bits in (0, 8, 4)]
    guard.tell({"then": "tensor"})
    lead = Lead(load("tensor"), ranks, guard)
    texts += [drafted(lead, whole, bits) for bits in (0, 8, 4)]
    print(json.dumps(texts))
    guard.end(0)
else:
    follower, told, then = Follower(part), [], False
    try:
        while True:
            message = guard.receive()
            if "then" in message:
                follower, then = Follower(load(message["then"])), True
                continue
            told += [] if then else [message]
            if (reply := follower.obey(message)) is not None:
                guard.gather(reply)
    except Ended as ended:
        assert ended.code == 0
    # What each rank has fed: the answers' tokens but the last of each.
    steps = [message["ids"] for message in told if message.get("call") == "next_logits" and message["number"] == RUN]
    print(json.dumps([row[0] for (row,) in steps[1:]]))
    rows = [message["ids"] for message in told if message.get("call") == "next_logits" and message["number"] == POOL]
    print(json.dumps(sorted(row[0] for step in rows for row in step if len(row) == 1)))
sys.stdout.flush()
os._exit(0)  # as the command ends: threads of MLX and of the guard are still there
"""


def test_every_rank_has_the_tokens_of_one_process(tmp_path: Path) -> None:
    config = qwen2_config(num_hidden_layers=2)
    save_checkpoint(tmp_path, config, reference_model(config))
    model = load_decoder(tmp_path)
    cache = model.make_cache(TOKENS + 10, quant_bit=8, quant_group=16)
    sampler = make_sampler(temp=1.0, seed=5)
    expected = [token for token, _ in Run(model, [1, 2, 3], cache, max_tokens=TOKENS, sampler=sampler)]
    for parallel in count(["pipeline"], ["pipeline", "tensor"]):
        arguments = str(tmp_path), str(TOKENS), parallel, str(Path(__file__).parents[1])
        first, *others = run_script(2, SCRIPT, *arguments, timeout=300)
        answers, run, drafted = map(json.loads, first.splitlines())
        for alone, divided in drafted:
            assert divided == alone
        if parallel == "pipeline":
            assert run == expected
        assert len(run) == TOKENS
        for other in others:
            fed, rows = map(json.loads, other.splitlines())
            assert fed == run[:-1]
            assert rows == sorted(token for answer in answers for token in answer[:-1])
