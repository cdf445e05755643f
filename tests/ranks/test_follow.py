"""A thousand tokens over several ranks: rank 0 draws them, and every rank has the same, in a run and in an engine."""

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
from kvant.engine.batch_engine import BatchEngine
from kvant.engine.request import Request
from kvant.engine.run import Run
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
if sys.argv[3] == "tensor":
    part = load_tensor(folder, ranks)
else:
    part = load_stage(folder, ranks, range(ranks.rank, ranks.rank + 1))
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
    guard.end(0)
else:
    follower, told = Follower(part), []
    try:
        while True:
            message = guard.receive()
            told.append(message)
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
        first, *others = run_script(2, SCRIPT, str(tmp_path), str(TOKENS), parallel, timeout=300)
        answers, run = map(json.loads, first.splitlines())
        if parallel == "pipeline":
            assert run == expected
        assert len(run) == TOKENS
        for other in others:
            fed, rows = map(json.loads, other.splitlines())
            assert fed == run[:-1]
            assert rows == sorted(token for answer in answers for token in answer[:-1])
