"""Mutate a small model folder, load it, render its template and generate. kvant must refuse in one line, or
run, in bounded time and memory.

    python scripts/fuzz.py [--seconds 120] [--seed 0] [--count 1] [--gguf FILE]

Each folder has a seed and a process of its own. Standard input says y to any question. A finding prints a
line: the seed, the change, and the fault, which is a traceback, a signal, a hang, too much memory, words on
    standard output, or
code of the folder that was executed. --count 1 with a finding's --seed runs it again and shows it.
"""

import argparse
import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile_kinds

import kvant
from kvant import weights
from kvant.cli.models import models
from kvant.engine.load import POCKET, find_model
from kvant.errors import KvantError
from kvant.models.architectures import ARCHITECTURES
from kvant.text.prompt import encode_rendered, render_chat
from kvant.tools.bench.shapes import Shape, write_random
from kvant.tools.gguf.importer import import_gguf

LIMIT_S = 60
LOOK_S = 0.02
WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
LIMIT_BYTES = 1_500_000_000  # more than libraries and a tiny model take
VALUES: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    3,
    7,
    64,
    2**24,
    2**31,
    2**32 - 1,
    2**63,
    10**4000,
    -0.0,
    0.5,
]
VALUES += [
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\0",
    "\ud800",
    "a\nb",
    "../x",
    "/dev/zero",
    "x" * 100_000,
]
VALUES += [
    [],
    {},
    [1],
    [[]],
    {"a": 1},
    ["a", "b"],
    [None],
    "<unk>",
    "BPE",
    "WordLevel",
    "Sequence",
    "(a+)+$",
    "[",
]
KEYS = [
    "auto_map",
    "model_file",
    "chat_template_type",
    "tool_parser_type",
    "tokenizer_class",
    "vocab_file",
    "head_dim",
]
KEYS += [
    "fast_tokenizer_files",
    "init_inputs",
    "tokenizer_object",
    "extra_special_tokens",
    "added_tokens_decoder",
]
KEYS += ["quantization", "rope_scaling", "quantization_config", "model_max_length", "padding", "truncation"]
KEYS += ["__class__"]
OFTEN = ("config.json", "tokenizer.json", "tokenizer_config.json")  # the files that most code reads
TEMPLATES = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 10**(10**10) }}",
    "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ "
    "n.x }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[0].content.format(1) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ [1] | batch(10**9, 0) | list }}",
    "{{ '%s' | format(messages) }}",
    "{{ raise_exception(messages) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{% for m in messages %}",
    "{{ x.y.z }}",
    "\ud800",
]


def base_folder(folder: Path, model_type: str = "qwen2") -> None:
    """A model of two tiny layers with the embedded model's tokenizer, and code beside it that would leave
    a mark.
    """

    def write(folder: Path) -> None:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        more = experts if ARCHITECTURES[model_type].experts else {}
        write_random(Shape("tiny", model_type, 64, 2, 2, 2, 32, 64, 1280, True, **more), folder, bits=0)

    outcome = run(folder, write)
    assert outcome == "ok", outcome
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(find_model(POCKET) / name, folder)
    hostile_kinds.plant(folder)


def mutate(folder: Path, rng: random.Random) -> str:
    """Change the folder in a few ways. Returns a description of them."""
    done = []
    if rng.random() < 0.2:
        name = rng.choice(sorted(hostile_kinds.KINDS))
        done.append(f"{name}: {hostile_kinds.KINDS[name](folder, rng)}")
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        files = sorted(
            p for p in folder.iterdir() if p.is_file() and not p.is_symlink() and p.suffix != ".py"
        )
        path = rng.choice([*files, *(path for path in files if path.name in OFTEN)])
        if rng.random() < 0.06:
            how = replace_file(path, rng)
        elif path.suffix == ".safetensors":
            how = mutate_safetensors(path, rng)
        elif rng.random() < 0.15:
            how = mutate_bytes(path, rng, 0, path.stat().st_size)
        else:
            try:
                raw = json.loads(path.read_bytes())
            except ValueError:
                continue
            if path.name == "tokenizer_config.json" and isinstance(raw, dict) and rng.random() < 0.4:
                many = rng.choice(["(", "{{", "{% if 1 %}", "-", "a.", "{#"]) * rng.choice([1, 9999])
                raw["chat_template"] = template = rng.choice([*TEMPLATES, many])
                how = f"template {template[:60]!r}"
            else:
                how = mutate_json(raw, rng)
            path.write_text(json.dumps(raw))
        done.append(f"{path.name}: {how}")
    return "; ".join(done)


def replace_file(path: Path, rng: random.Random) -> str:
    """Replace a file by something that is no file of the folder."""
    path.unlink()
    makers: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "fifo": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "link": lambda: path.symlink_to("/etc/passwd"),
        "loop": lambda: path.symlink_to(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "empty": path.touch,
    }
    kind = rng.choice([*makers])
    makers[kind]()
    return kind


def mutate_bytes(path: Path, rng: random.Random, start: int, end: int) -> str:
    """Flip, insert, cut or repeat bytes between two places."""
    data = bytearray(path.read_bytes())
    place = rng.randrange(start, max(start + 1, min(end, len(data))))
    kind = rng.choice(["flip", "insert", "cut", "nest", "append", "repeat"])
    if kind == "flip" and place < len(data):
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[place:]
    elif kind == "append":
        data += bytes(rng.randrange(1, 100))
    else:
        nest = rng.choice([b"[", b'{"a":']) * rng.choice([10, 127, 900, 100_000])
        repeat = bytes(data[start : start + rng.randrange(1, 200)])
        data[place:place] = {"insert": rng.randbytes(rng.randrange(1, 9)), "nest": nest}.get(kind, repeat)
    path.write_bytes(data)
    return f"{kind} at {place}"


def mutate_json(raw: Any, rng: random.Random) -> str:
    """Change one value somewhere."""
    node, trail = raw, ""
    while True:
        keys: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = rng.choice(keys) if keys else None
        inner = node[key] if keys else None
        trail += f"/{key}"
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.25:
            break
        node = inner
    kind = rng.choice(["value", "value", "number", "delete", "add", "copy"])
    value = rng.choice(VALUES)
    if kind == "add" and isinstance(node, dict):
        trail += f" {rng.choice(KEYS)}"
        node[trail.split()[-1]] = value
    elif key is None:
        return f"{trail} is empty"
    elif kind == "delete":
        del node[key]
    elif kind == "number" and isinstance(inner, int):
        value = node[key] = rng.choice(
            [-inner, inner + 1, inner * 2, inner * 10**6, inner + 2**32, float(inner)]
        )
    elif kind == "copy" and isinstance(node, dict):
        node[str(key) + "x"] = inner
    else:
        node[key] = value
    return f"{kind} {trail} {str(value)[:40]!r}"


def mutate_safetensors(path: Path, rng: random.Random) -> str:
    """Its length, its header or its data."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.4 or length > len(data):
        return mutate_bytes(path, rng, 0, 8 + length)
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError:
        return mutate_bytes(path, rng, 0, len(data))
    how = mutate_json(header, rng)
    text = json.dumps(header).encode()
    if rng.random() < 0.2:
        text = text[:-1] + b"," + text[1:]  # everything twice
        how += " twice"
    size = rng.choice([len(text)] * 8 + [0, 1, 2**31, 10 * 10**9, 2**63, 2**64 - 1])
    path.write_bytes(size.to_bytes(8, "little") + text + data[8 + length :])
    return f"{how}, length {size - len(text):+}"


NUMBER_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a GGUF file's types
TEXT, ARRAY = 8, 9


def numbers_of(data: bytes) -> tuple[list[tuple[int, int]], int]:
    """(place, bytes) of numbers in a good GGUF file's header, of arrays only the first; and the header's
    end.
    """
    places: list[tuple[int, int]] = []
    at = 4

    def number(size: int, note: bool = True) -> int:
        nonlocal at
        places.extend([(at, size)] if note else [])
        at += size
        return int.from_bytes(data[at - size : at], "little")

    def skip_text(note: bool = True) -> None:
        nonlocal at
        length = number(8, note)
        at += length

    def value(kind: int, note: bool = True) -> None:
        if kind == TEXT:
            skip_text(note)
        elif kind == ARRAY:
            inner, length = number(4), number(8)
            for place in range(length):
                value(inner, place < 2)
        else:
            number(NUMBER_BYTES[kind], note)

    number(4)
    tensors, keys = number(8), number(8)
    for _ in range(keys):
        skip_text()
        value(number(4))
    for _ in range(tensors):
        skip_text()
        for _ in range(number(4)):
            number(8)
        number(4)
        number(8)
    return places, at


def mutate_gguf(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Change a GGUF file: mostly numbers of its header, such as lengths, counts, types and offsets."""
    places, end = numbers_of(data)
    made, done = bytearray(data), []
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at, size = rng.choice(places)
        kind = rng.choice(["number", "number", "number", "nudge", "flip", "cut", "insert", "remove", "data"])
        if kind == "number":
            new = rng.choice([0, 1, 2, 8, 9, 32, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1])
            made[at : at + size] = (new % 256**size).to_bytes(size, "little")
        elif kind == "nudge":
            new = int.from_bytes(made[at : at + size], "little") + rng.choice([-32, -1, 1, 32])
            made[at : at + size] = (new % 256**size).to_bytes(size, "little")
        else:
            at = rng.randrange(end, len(data)) if kind == "data" else rng.randrange(end)
            if kind == "cut":
                del made[at:]
            elif kind == "insert":
                made[at:at] = rng.randbytes(rng.randrange(1, 40))
            elif kind == "remove":
                del made[at : at + rng.randrange(1, 40)]
            elif at < len(made):
                made[at] ^= 1 << rng.randrange(8)
        done.append(f"{kind} at {at}")
    return bytes(made), "; ".join(done)


def use_gguf(folder: Path) -> None:
    """Import the file of a folder. A file that is refused leaves nothing behind."""
    dest = folder / "imported"
    try:
        import_gguf(folder / "model.gguf", dest)
    except KvantError:
        left = sorted(path.name for path in folder.iterdir())
        assert left == ["model.gguf"], left
        raise


def use(folder: Path) -> None:
    """Use a folder as a user does."""
    list_models(folder)
    model, tokenizer = kvant.load(folder)
    prompt = render_chat(tokenizer, [{"role": "user", "content": "Hello!"}])
    encode_rendered(tokenizer, prompt)
    kvant.generate(model, tokenizer, prompt[:2000], max_tokens=2)


def list_models(folder: Path) -> None:
    """`kvant models`, as if the folder had been pulled."""
    found = weights.Pulled(("a/b",), "a/b", "0" * 40, folder, {}, None)
    with contextlib.redirect_stdout(io.StringIO()):
        weights.pulled = lambda: [found]  # type: ignore[assignment]
        for json_rows in (True, False):
            models(json_rows)


def run(folder: Path, work: Callable[[Path], None]) -> str:
    """Work on a folder in a process of its own: "ok", "refused: ..." or the fault."""
    output, printed, mark = (
        folder.with_suffix(".log"),
        folder.with_suffix(".out"),
        folder.with_name("executed"),
    )
    child = os.fork()
    if not child:
        code = 70
        try:
            _enter(folder, output, printed)
            work(folder)
            code = 0
        except KvantError as error:
            code = 10 if str(error).isprintable() else 71
            output.write_text(str(error))
        except BaseException:
            output.write_text(traceback.format_exc())
        finally:
            os._exit(code)
    code, peak = _watch(child)
    text = output.read_text(errors="replace").strip() if output.exists() else ""
    last = text.splitlines()[-1][:300] if text else ""
    if mark.exists():
        shutil.rmtree(mark)
        return f"executed code of the folder: {last}"
    if peak > LIMIT_BYTES:
        return f"took {peak / 1e6:.0f} MB: {last}"
    if code == -signal.SIGALRM:
        return "hung"
    if code < 0:
        return f"died of {signal.Signals(-code).name}: {last}"
    if printed.exists() and printed.stat().st_size:
        return f"wrote to standard output: {printed.read_text(errors='replace')[:300]!r}"
    return {0: "ok", 10: f"refused: {last}"}.get(code, f"raised: {last}")


def _enter(folder: Path, output: Path, printed: Path) -> None:
    """Standard streams of its own, limits, and the folder as the current one."""
    agreeing = folder.with_suffix(".in")
    agreeing.write_text("y\n" * 1000)
    for number, path, flags in ((0, agreeing, os.O_RDONLY), (1, printed, WRITE), (2, output, WRITE)):
        os.dup2(os.open(path, flags, 0o600), number)
    if folder.is_dir():
        os.chdir(folder)
        sys.path = [path for path in sys.path if path]  # python -c looks there; the command does not
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(LIMIT_S)


def _watch(child: int) -> tuple[int, int]:
    """The exit code, and the most memory that the process and those it started took together.

    Those are looked at from time to time, on Linux.
    """
    peak = 0
    while True:
        peak = max(peak, _family_bytes(child))
        if peak > LIMIT_BYTES:
            os.kill(child, signal.SIGKILL)
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            own = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            return os.waitstatus_to_exitcode(status), max(peak, own)
        time.sleep(LOOK_S)


def _family_bytes(process: int) -> int:
    """Memory of a process and of those it started; 0 if unknown."""
    total = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        statistics = Path(f"/proc/{process}/statm").read_text().split()
        total = int(statistics[1]) * resource.getpagesize()
        for task in Path(f"/proc/{process}/task").iterdir():
            total += sum(map(_family_bytes, map(int, (task / "children").read_text().split())))
    return total


def main() -> int:
    """Fuzz for a while; 1 if anything was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=None)
    parser.add_argument("--gguf", type=Path, help="mutate this GGUF file instead, and import it")
    options = parser.parse_args()
    # Imported once, for all children; nothing is computed here: MLX's threads would not be there after a
    # fork.
    from mlx_lm import tokenizer_utils  # noqa: F401
    from transformers import AutoTokenizer  # noqa: F401

    end, seed, outcomes, findings = time.monotonic() + options.seconds, options.seed, Counter[str](), 0
    with tempfile.TemporaryDirectory() as place:
        # transformers trusts their files differently; and one with experts
        bases = [Path(place) / kind for kind in ("qwen2", "llama", "qwen3_moe")]
        for base in bases:
            base.mkdir()
            base_folder(base, base.name)
            assert run(base, use) == "ok", run(base, use)
        while time.monotonic() < end and (options.count is None or seed < options.seed + options.count):
            folder = Path(place) / "model"
            if options.gguf is None:
                shutil.copytree(bases[seed % len(bases)], folder)
                how = mutate(folder, random.Random(seed))
                outcome = run(folder, use)
            else:
                folder.mkdir()
                data, how = mutate_gguf(options.gguf.read_bytes(), random.Random(seed))
                (folder / "model.gguf").write_bytes(data)
                outcome = run(folder, use_gguf)
            kind = outcome.split(":")[0]
            outcomes[kind if kind in ("ok", "refused") else "finding"] += 1
            if kind not in ("ok", "refused") or options.count is not None:
                findings += kind not in ("ok", "refused")
                print(f"seed {seed}: {how} -> {outcome}", flush=True)
            shutil.rmtree(folder)
            seed += 1
    print(f"seeds {options.seed} to {seed - 1}: {dict(outcomes)}")
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
