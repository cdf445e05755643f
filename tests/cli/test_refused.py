"""Command lines that are refused: one line that names the flag or the file, before anything starts or is
written.
"""

import json
import os
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from support.bridged import write_mlx_lm, write_words
from support.command import refusal

from kvant.cli import session
from kvant.errors import KvantError
from kvant.files import read_user_file
from kvant.installation import install_command

PROMPTS = [
    {"prompt": "Hello!"},
    {"prompt": "Hi"},
    {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Thank you! " * 9}]},
]
FILES = {
    "hosts": json.dumps([{"ssh": "studio", "ips": ["10.0.0.1"]}, {"ssh": "mini", "ips": ["10.0.0.2"]}]),
    "other-hosts": '[{"ssh": "a\\u0000b", "ips": ["1"]}, {"ssh": "127.0.0.1", "ips": ["2"]}]',
    "keys": "key\n",
    "prompts": "\n".join(map(json.dumps, PROMPTS)),
    "there.jsonl": "mine",
}
USAGE = [
    ("generat hi", "Did you mean 'generate'?"),
    # Prompt and model.
    ("generate", "no prompt"),
    ("generate ''", "the prompt is empty"),
    ("generate '  '", "the prompt is empty"),
    (
        "generate once upon a",
        "3 arguments are given; put a prompt of several words in quotes: kvant generate ",
    ),
    ("generate once upon a", 'kvant generate "once upon a"'),
    ("generate pocket once upon", 'kvant generate pocket "once upon"'),
    ("generate cost: '$5' \"isn't\"", """kvant generate 'cost: $5 isn'"'"'t'"""),
    (f"generate {'a ' * 99}", 'kvant generate "PROMPT"'),
    ("generate pocket", "'pocket' is a model's name, and there is no prompt"),
    ("generate pocket a --model pocket", "the model is given twice, as the argument 'pocket'"),
    ("serve pocket --model pocket", "the model 'pocket' is given twice"),
    ("serve --model pocket --models pocket,other", "the model 'pocket' is given twice"),
    ("serve --models pocket,,other", "--models has an empty name"),
    ("serve --models .", "a folder without folders of models"),
    ("serve --keep-alive soon", "--keep-alive is 'soon'; expected a time such as 0, 90s, 5m or forever"),
    ("serve pocket --model other --draft-model pocket", "--draft-model is for one model; 2 models are given"),
    ("serve pocket --model other --adapter-path x", "--adapter-path is for one model"),
    ("serve pocket --model other --wired", "--wired is for one model"),
    ("serve pocket --model other --pooling mean", "--pooling is for one model"),
    ("serve pocket --model other --alias a=b", "'b' is none of the models"),
    ("convert pocket x --model pocket", "the model is given twice"),
    ("convert --mlx-path x -q", "no SOURCE"),
    ("convert --hf-path pocket --model pocket x -q", "the model is given twice"),
    ("convert pocket x --mlx-path y -q", "DEST is given twice"),
    (
        "convert --hf-path pocket --mlx-path x",
        "--hf-path is mlx_lm.convert's, which does not quantize without -q",
    ),
    (
        "convert pocket x -q --bits 0 --dtype float16",
        "--bits is 0, which does not quantize; expected no --quantize",
    ),
    ("convert pocket x --mode gptq", "--mode is 'gptq'; expected affine, mxfp4, mxfp8, nvfp4"),
    ("convert pocket x --dtype int8", "--dtype is 'int8'; expected float16, bfloat16, float32"),
    ("convert pocket x --bits 0", "--bits is 0, which changes nothing without --dtype"),
    (
        "convert pocket x --bits 0 --dtype float16 --group-size 32",
        "--group-size is 32, but 0 bits do not quantize",
    ),
    # The flags of a run.
    ("serve --port 0 --kv-group-size 7", "--kv-bits 8 --kv-group-size 7: "),
    ("generate a --kv-bits 0 --kv-group-size 8", "--kv-group-size is 8, but --kv-bits 0 does not quantize"),
    ("plan --checkpoints -1", "--checkpoints is -1; expected an int, 0 or more"),
    ("plan --checkpoints 3", "--checkpoints is 3; this model needs none: it has no windows and no states"),
    ("chat --checkpoints 3", "--checkpoints is 3; this model needs none: it has no windows and no states"),
    ("generate a --max-kv-size 0", "--max-kv-size is 0"),
    ("plan --max-kv-size all", "--max-kv-size is 'all'"),
    ("generate a --n 10001", "--n is 10001; expected at most 10000"),
    ("generate a --prefill-step-size -1", "--prefill-step-size is -1"),
    ("generate a --deterministic --prefill-step-size 64", "--deterministic reads prompts in chunks of 128"),
    ("generate a --stop ''", "--stop is empty"),
    ("generate a --extra-eos-token 'two words'", "--extra-eos-token is 'two words', which is "),
    ("generate a --extra-eos-token 77777", "--extra-eos-token is 77777; the model knows 0 to "),
    (
        "generate a --extra-eos-token I --ignore-eos",
        "--extra-eos-token ends a text, and --ignore-eos continues past",
    ),
    ("generate a --prefill-response b --ignore-chat-template", "--prefill-response needs the chat template"),
    ("serve --port 0 --chat-template-config '{\"none\": 1}'", "has 'none', which the chat template does not"),
    ("chat --chat-template-config '{\"messages\": []}'", "has 'messages', which kvant sets itself"),
    ("generate a --chat-template-config [1]", "is '[1]'; expected a JSON object"),
    ("generate a --parallel tensor", "--parallel is 'tensor', which has no effect in one process"),
    # Sampling.
    ("generate a --logit-bias x", "--logit-bias is 'x'; expected TOKEN:BIAS"),
    ("generate a --temp 1 --logit-bias 9999:1", "--logit-bias has token 9999"),
    ("generate a --repetition-context-size 5", "--repetition-context-size is 5"),
    # Several answers, and several prompts.
    ("generate a --n 2 --temp 0", "--n is 2; with --temp 0 every answer is the same"),
    ("generate a --sequences 2", "--sequences is 2, which has no effect"),
    (
        f"generate --prompts-file prompts --sequences {'9' * 20}",
        f"--sequences is {'9' * 20}; expected at most",
    ),
    (
        "generate --prompts-file prompts --prompt-cache-file x",
        "--prompt-cache-file is 'x'; it is not supported with",
    ),
    ("generate pocket a --prompts-file prompts", "as an argument and with --prompts-file"),
    (
        "generate --prompts-file prompts --ignore-chat-template",
        "prompts: line 3: messages need the chat template",
    ),
    # Drafts.
    ("generate a --draft-model pocket --num-draft-tokens 8", "--num-draft-tokens is 8; expected 1 to 7"),
    ("generate a --num-draft-tokens 3", "--num-draft-tokens is 3, which has no effect"),
    ("generate a --draft-model pocket --draft prompt", "--draft is prompt, and --draft-model drafts"),
    ("serve --draft prompt --deterministic", "--draft is prompt; it is not supported with --deterministic"),
    ("plan --memory 0GB", "--memory is '0GB'"),
    ("plan --device tpu", "--device is 'tpu'"),
    ("plan --weight-group-size 64", "--weight-group-size is 64, but without --weight-bits"),
    ("plan --weight-bits 0", "--weight-bits is 0; expected bits of a quantized weight"),
    ("plan --weight-bits 4 --weight-group-size 48", "--weight-group-size is 48"),
    ("plan pocket --remote", "'pocket' is built into kvant"),
    ("chat ./my model", "too many arguments: model; put text with spaces in quotes"),
    ("generate ./my model Hi", "put a path with spaces, and a prompt of several words, in quotes"),
    ("chat --overflow drop", "'--overflow': 'drop' is not one of"),
    ("serve --port http", "'--port': expected a whole number"),
    ("generate a --temp hot", "'--temp': expected a number"),
    ("gen a", "No such command 'gen'. `kvant --help` lists the commands"),
    ("chat -x", "No such option: -x; add --help"),
    ("plan --ranks 1", "--ranks is 1; expected 2 to 256"),
    ("plan --hostfile hosts --memory 1GB,1GB,1GB", "--memory has 3 sizes for 2 machines"),
    ("plan --hostfile hosts --ranks 2", "--ranks is 2, and --hostfile names the machines"),
    ("plan --hostfile no/such", "--hostfile is no/such, which is not a host file: "),
    ("plan --parallel tensor", "--parallel tensor divides a model among ranks"),
    ("plan --parallel both --ranks 2", "--parallel is 'both'"),
    ("plan --draft-model pocket --ranks 2", "several ranks draft only from prompt and answer"),
    ("launch -n 2 -- generat", "did you mean 'generate'?"),
    ("launch -n 2 --hostfile x generate", "both -n and --hostfile"),
    ("launch -n 0 generate", "--ranks is 0; expected 1 to 64"),
    ("launch --hostfile other-hosts generate", "rank 0: ssh is 'a\\x00b'"),
    (
        "serve --host 0.0.0.0",
        "--host is 0.0.0.0, which other machines reach; it is refused without --api-key-file",
    ),
    ("serve --host 'a b'", "--host is 'a b'"),
    ("serve --port 65536", "--port is 65536; expected 0 to 65535"),
    ("serve --sequences 257", "--sequences is 257; expected 1 to 256"),
    ("serve --max-queue 0", "--max-queue is 0"),
    ("serve --allow-origin *", "--allow-origin is '*'; expected scheme://host[:port]"),
    ("serve --alias ' '", "--alias is ' '"),
    ("serve --temp 0", "--temp"),  # of a request
    ("bench --kv-bits 8,x", "--kv-bits is '8,x'"),
    ("bench --kv-bits 2", "--kv-bits has 2"),
    ("bench --kv-bits 0 --kv-group-size 32", "--kv-bits 0 does not quantize"),
    ("bench --prompt-tokens 0", "--prompt-tokens has 0"),
    ("bench --prompt-tokens 128,1985", "more than the model's context of 2048"),
    ("bench --max-tokens 1921", "the model's context is 2048"),
    ("bench --repeats 0", "--repeats is 0"),
    ("bench --random gpt-5", "--random is 'gpt-5'"),
    ("bench --random pocket --model pocket", "--random excludes it"),
    ("bench --random pocket --seed -1", "--seed is -1"),
    ("bench --weight-group-size 32", "only --random makes weights"),
    ("bench --random pocket --weight-bits 0 --weight-group-size 64", "--weight-bits 0 does not quantize"),
    ("bench --server-model x", "--server-model is 'x', but --server is given 0 times"),
    ("bench --server http://x --server http://y", "the name 'server' twice"),
    ("bench --server =http://x", "expected NAME=URL"),
    ("bench --random pocket --server http://x", "--server needs --model"),
    ("bench --draft prompt --plot a.svg", "--plot is a.svg; drafts"),
    ("bench --draft prompt --engine mlx-lm", "only kvant drafts"),
    ("bench --draft-model pocket --random pocket", "--random is pocket; a draft model"),
    ("bench --streams 4 --baseline kvant", "'kvant 8-bit', 'kvant 8-bit, one by one'"),
    ("bench --output there.jsonl", "there.jsonl exists"),
    ("bench --output no/x.jsonl", "does not exist"),
    ("bench --plot x.svg --output x.svg", "--output and --plot are both"),
    ("bench --plot x.png --max-tokens 1", "--max-tokens is 1"),
    ("bench --streams 0", "--streams has 0"),
    ("bench --streams 4 --server http://x --kv-bits 8", "--kv-bits is 8; --streams with --server"),
    ("report --formats 8g48", "--formats: format 8g48: kv_group_size 48 does not divide"),
    ("report --formats 0:pmx", "format '0:pmx' is unknown"),
    ("report --formats 4g32:tail:pmx", "format '4g32:tail:pmx' is unknown"),
    ("report --formats 4g32:pmx --kv-format pmx", "--formats has as 4g32:pmx"),
    (
        "generate Hello --kv-format pmx --kv-bits 0",
        "--kv-format is pmx, which quantizes; the cache has 0 bits",
    ),
    ("generate Hello --kv-bits 0 --kv-tail", "without quantization every token is exact"),
    ("report --formats ''", "--formats: format '' is unknown"),
    ("report --formats 0,0", "twice"),
    ("report --tokens 7", "--tokens is 7; expected at least 8"),
    ("report --plot a.pdf", "--plot: the plot file is a.pdf"),
]
ON_A_CPU = [
    ("generate a --wired", "--wired: only a Mac's GPU has memory to wire"),
    ("generate --prompts-file prompts --kernels fused", "--kernels is 'fused'"),
    ("bench --streams 4 --engine kvant:fused", "setting is 'fused'; MLX's default device is not a GPU"),
]
FAILURES = [
    (f"generate -q '{'word ' * 4000}'", "tokens; 2048 are"),
    ("generate -q 'Tell me a story' --max-kv-size 5", "tokens; 5 are reserved"),
    ("generate a --max-kv-size 4096", "--max-kv-size is 4096; the model's context is 2048 tokens"),
    (
        "generate hello world",
        """expected one that `kvant models` lists, or owner/repository[@revision]; put """,
    ),
    ("generate hello world", 'put a prompt of several words in quotes: kvant generate "hello world"'),
    (f"generate {'x' * 5000} world", 'in quotes: kvant generate "PROMPT"'),
    (
        "generate no/such world",
        'fetches it; put a prompt of several words in quotes: kvant generate "no/such world"',
    ),
    ("generate a --model no/such", "no/such is not here; `kvant pull no/such` fetches it"),
    ("generate a --model Poket", "'Poket' is not a folder or a known name; did you mean 'pocket'?"),
    ("generate a --model '~nosuchuser/x'", "is not a folder"),
    (f"generate a --model {'x' * 5000}", "is not a folder"),
    ("generate a --draft-model ./none", "model './none' is not a folder"),
    *(
        (f"{command} none", "model 'none' is not a folder")
        for command in ("chat", "plan", "serve --port 0", "report")
    ),
    *((f"{command} none x", "model 'none' is not a folder") for command in ("convert", "convert --model")),
    ("bench none", "model 'none' is not a folder"),
    ("plan 'a b' --remote", "'a b' is not a known model"),
    *(
        (f"{each} --adapter-path no/such", "adapter 'no/such' is not a folder")
        for each in ("plan", "serve --port 0", "report")
    ),
    ("plan --adapter-path .", "no adapters.safetensors; an adapter folder"),
    ("serve --port 0 --host 192.0.2.1 --api-key-file keys", "cannot listen on 192.0.2.1 port 0: "),
    ("report --text none.txt", "none.txt: cannot be read: No such file"),
    ("generate -q --prompts-file prompts --max-kv-size 20", "prompts: line 3: the prompt has "),
    (
        "generate --prompts-file prompts --max-kv-size 9999",
        "--max-kv-size is 9999; the model's context is 2048",
    ),
]
REFUSED = [
    *((2, *each) for each in USAGE),
    *((2, *each) for each in ON_A_CPU if not mx.metal.is_available()),
    *((1, *each) for each in FAILURES),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(("code", "line", "words"), REFUSED, ids=[line[:60] for _, line, _ in REFUSED])
def test_a_command_line(
    code: int, line: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    if line.startswith("bench"):
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process is started"))
    assert words in refusal(code, *shlex.split(line))
    assert {path.name: path.read_text() for path in folder.iterdir()} == FILES


@pytest.mark.parametrize(
    "flags",
    [
        ["generate", "--prompts-file"],
        ["serve", "--port", "0", "--api-key-file"],
        ["evidence", "--check"],
        ["report", "--reference"],
    ],
)
@pytest.mark.parametrize("kind", ["device", "pipe", "large", "missing"])
def test_what_is_no_file_is_refused(flags: list[str], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "given"
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        with open(path, "wb") as file:
            file.truncate(2**40)
    assert str(path) in refusal(1, *flags, str(path))


def test_a_link_and_a_home_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "real").write_bytes(b"text")
    (tmp_path / "link").symlink_to("real")
    assert read_user_file("~/link", 4) == b"text"
    with pytest.raises(KvantError, match="at most 3"):
        read_user_file("~/link", 3)
    with pytest.raises(KvantError, match="nobodyhere"):
        read_user_file("~nobodyhere/link", 4)


@pytest.mark.parametrize(
    "content", [b"", b"\n \r\n", b"two words", b"schl\xc3\xbcssel", b"ok\nk\x00ey", b"x" * 1001]
)
def test_files_that_hold_no_keys(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(content)
    error = refusal(2, "serve", "--port", "0", "--api-key-file", str(tmp_path / "keys"))
    assert "--api-key-file" in error
    said = error.partition("--api-key-file")[2].partition("line")[2]
    assert not any(word.decode("latin-1") in said for word in content.split())


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        error = refusal(1, "serve", "no-such-model", "--port", port)
    assert f"cannot listen on 127.0.0.1 port {port}: " in error
    assert "another process listens there; choose another --port" in error


def test_a_server_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in [name for name in sys.modules if name.startswith("kvant.server")]:
        monkeypatch.delitem(sys.modules, name)
    error = refusal(1, "serve", "--port", "0")
    assert "kvant serve needs the extra 'serve'" in error
    assert error.endswith(f"; {install_command('serve')}")


def test_a_servers_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    real = session.this_machine()
    monkeypatch.setattr(session, "this_machine", lambda device=None: replace(real, limit_bytes=500_000_000))
    error = refusal(1, "serve", "--port", "0", "--sequences", "200", "--max-kv-size", "2048")
    for words in ("200 sequences of 2048 tokens need ", "less 150.00 MB for requests", "would fit"):
        assert words in error


def test_a_model_that_has_no_pool(tmp_path: Path) -> None:
    write_words(folder := write_mlx_lm(tmp_path / "chunks", "llama4"), 64)
    error = refusal(1, "serve", str(folder), "--port", "0", "--max-kv-size", "16")
    assert "llama4 attends in chunks, which a pool has no pages for" in error
    assert "one sequence at a time works" in error
