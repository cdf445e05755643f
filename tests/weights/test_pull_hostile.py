"""A hub that means harm, or is broken: every line is clear, every time and size bounded, nothing of it is kept."""

import json
import time

import pytest
from support.counts import count
from support.hub import Hub, git_id
from support.pull_machine import REPOSITORY, WEIGHTS, Machine


# One limit of time each, made short; the others are so long that a busy machine keeps them.
def _limits(head_s: float, window_s: float, wait_s: float) -> dict[str, str]:
    return {
        "kvant.weights.answer.HEAD_S": str(head_s),
        "kvant.weights.answer.WINDOW_S": str(window_s),
        "kvant.weights.answer.timeout_s": f"lambda: {wait_s}",
        "kvant.weights.download.WAIT_S": "0.01",
    }


SHORT_HEAD, SHORT_WINDOW, SHORT_WAIT = _limits(1, 60, 1), _limits(30, 0.6, 30), _limits(30, 60, 0.5)
ETAGS = ('"../../../../escaped"', '"/../../../../../escaped"', '""', '".."', '"' + "0" * 300 + '"', "escaped", "W/x")


@pytest.fixture(autouse=True)
def nothing_escapes(machine: Machine) -> None:
    """A file beside the cache, which must still be the only one after a test."""
    (machine.home / "escaped").write_bytes(b"untouched")


def _check_nothing_escaped(machine: Machine) -> None:
    assert list(machine.home.rglob("*escaped*")) == [machine.home / "escaped"]
    assert (machine.home / "escaped").read_bytes() == b"untouched"
    outside = {path.name for path in (machine.home / "hf").glob("hub/*")}
    assert outside <= {".locks", machine.blobs.parent.name}


def test_an_etag_is_no_path(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """huggingface_hub joins it to its cache's."""
    hub.add(REPOSITORY, files)
    for etag in ETAGS:
        hub.etags = dict.fromkeys(files, etag)
        folder = machine.pull(REPOSITORY)
        assert (folder / WEIGHTS).read_bytes() == files[WEIGHTS]
        names = {path.name for path in machine.blobs.iterdir()}
        wanted = {path.name for path in folder.iterdir()} - {WEIGHTS}
        assert names == {(folder / WEIGHTS).resolve().name, *(git_id(files[name]) for name in wanted)}
        _check_nothing_escaped(machine)
        machine.forget()


def test_a_small_file_of_the_same_size(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """Its blob id tells, when it is fetched and where another program left it."""
    hub.add(REPOSITORY, files)
    other = files["config.json"].replace(b"2", b"3")
    hub.sent["config.json"] = other
    given, expected = git_id(other), git_id(files["config.json"])
    line = machine.refuses("pull", REPOSITORY)
    assert line.endswith(f"config.json: git blob id {given}; expected {expected}; what came is removed")
    assert not list(machine.blobs.iterdir())
    hub.sent.clear()
    blob = machine.blobs / expected
    blob.write_bytes(other)
    line = machine.refuses("pull", REPOSITORY)
    assert f"config.json: git blob id {given}; expected {expected}, as the hub states; nothing was deleted" in line
    blob.unlink()
    machine.pull(REPOSITORY)
    assert machine.resolves() is None


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_body_without_end(machine: Machine, hub: Hub, files: dict[str, bytes], name: str) -> None:
    """Never more than the listed bytes are written."""
    hub.add(REPOSITORY, files)
    hub.drip[name] = (files[name][:1000] * 500, 0.0)
    line = machine.refuses(
        "pull", REPOSITORY, PRELUDE="import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (13_000_000,) * 2)"
    )
    assert f"{name}: the hub sends more than the {len(files[name])} bytes it states; what came is removed" in line
    assert not list(machine.blobs.glob("*.incomplete"))


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "listing"])
def test_a_body_of_single_bytes(machine: Machine, hub: Hub, files: dict[str, bytes], name: str) -> None:
    """Every byte comes in time; all of them would take hours."""
    hub.add(REPOSITORY, files)
    hub.drip[name] = (b" ", 0.05)
    begun = time.monotonic()
    line = machine.refuses("pull", REPOSITORY, patches=SHORT_WINDOW)
    assert time.monotonic() - begun < 30
    assert "bytes came in 0.6 s; expected at least 10000 a second" in line


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "listing"])
def test_a_body_that_stops(machine: Machine, hub: Hub, files: dict[str, bytes], name: str) -> None:
    hub.add(REPOSITORY, files)
    hub.drip[name] = (b" ", 3600)
    begun = time.monotonic()
    line = machine.refuses("pull", REPOSITORY, patches=SHORT_WAIT)
    assert time.monotonic() - begun < 30
    assert "cannot be reached: timed out" in line
    assert len(hub.requests) < 20


def test_a_head_of_single_bytes(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.add(REPOSITORY, files)
    hub.slow_head = 0.1
    begun = time.monotonic()
    assert "no answer within 1 s" in machine.refuses("pull", REPOSITORY, patches=SHORT_HEAD)
    assert time.monotonic() - begun < 30


def test_the_login_stays_with_the_hub(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.add(REPOSITORY, files)
    hub.elsewhere["config.json"] = f"{hub.cdn}/cdn-of-small/config.json"
    token = {"HF_TOKEN": "hf_secret"}
    machine.refuses("pull", REPOSITORY, settings=token)
    hub.elsewhere.clear()
    machine.pull(REPOSITORY, settings=token)
    logins = {(request.host.partition(":")[0], request.login) for request in hub.requests}
    assert logins == {("127.0.0.1", "Bearer hf_secret"), ("localhost", None)}
    hub.requests.clear()
    kept = {"huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN": "True"}
    machine.pull(REPOSITORY, settings=token, patches=kept)
    assert {request.login for request in hub.requests} == {None}


def test_redirects(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    commit = hub.add(REPOSITORY, files)
    hub.elsewhere["config.json"] = f"/{REPOSITORY}/resolve/{commit}/config.json"
    assert "config.json: the hub redirects more than 5 times" in machine.refuses("pull", REPOSITORY)
    for address in ("file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x"):
        hub.elsewhere["config.json"] = address
        machine.refuses("pull", REPOSITORY)
    hub.elsewhere.clear()
    machine.pull(REPOSITORY)


def test_a_compressed_body(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """It was not asked for, and it could be a bomb."""
    hub.add(REPOSITORY, files)
    hub.encodings["config.json"] = "gzip"
    line = machine.refuses("pull", REPOSITORY)
    assert line.endswith("config.json: the hub sends it in the encoding 'gzip'; asked for none")


SHA = "0123456789" * 4
LISTINGS = [
    (b"", "not JSON"),
    (b"\xff", "not JSON"),
    (b"<html>", "not JSON"),
    (b"[" * 100_000, "not JSON: maximum recursion depth"),
    (b'{"a":' * 100_000, "not JSON: maximum recursion depth"),
    (b'{"sha": ' + b"9" * 100_000 + b"}", "not JSON: Exceeds the limit"),
    (b" " * (8 * 1024 * 1024 + 1), "the hub's listing has more than 8388608 bytes"),
    (b"[]", "the hub's listing is a JSON list; expected an object"),
    (b"null", "the hub's listing is None; expected an object"),
    (b"{}", "the hub answers for commit None; asked for main"),
    (b'{"sha": 7}', "the hub answers for commit 7"),
    (b'{"sha": "../../x"}', "the hub answers for commit '../../x'"),
    (b'{"sha": "' + b"0" * 41 + b'"}', "the hub answers for commit '000"),
    (b'{"sha": ["x"]}', "the hub answers for commit a JSON list"),
    *(
        (json.dumps({"sha": SHA, "siblings": siblings}).encode(), line)
        for siblings, line in [
            (None, "lists files as None; expected a list"),
            ({}, "lists files as a JSON object; expected a list"),
            ("config.json", "lists files as 'config.json'; expected a list"),
            ([None], "lists a file as None; expected an object with its name"),
            (["config.json"], "lists a file as 'config.json'; expected an object with its name"),
            ([{}], "lists a file as None; expected"),
            ([{"rfilename": 7}], "lists a file as 7; expected"),
            ([{"rfilename": ["x"]}], "lists a file as a JSON list; expected"),
            ([{"rfilename": "a\x1b]52;c;x\x07.json"}], "lists a file named"),
            ([{"rfilename": "x" * 300 + ".json"}], "lists a file named"),
            ([], "no config.json and safetensors"),
        ]
    ),
]
ENTRIES: list[tuple[dict[str, object], str]] = [
    ({"size": None}, "without a size"),
    ({"size": -1}, "with the size -1; expected 0 to 1099511627776 bytes"),
    ({"size": True}, "with the size True; expected"),
    ({"size": 574.0}, "with the size 574.0; expected"),
    ({"size": "574"}, "with the size '574'; expected"),
    ({"size": 10**400}, "with the size 1000"),
    ({"size": 2**40 + 1}, "with the size 1099511627777; expected"),
    ({"size": float("inf")}, "with the size inf; expected"),
    ({"size": float("nan")}, "with the size nan; expected"),
    ({"size": {}}, "with the size a JSON object; expected"),
    ({"blobId": "../../../../escaped"}, "with git blob id '../../../../escaped'; expected 40 hexadecimal digits"),
    ({"blobId": "0" * 41}, "expected 40 hexadecimal digits"),
    ({"blobId": "A" * 40}, "expected 40 hexadecimal digits"),
    ({"blobId": "0" * 39 + "\n"}, "expected 40 hexadecimal digits"),
    ({"blobId": 10**39}, "expected 40 hexadecimal digits"),
    ({"blobId": None}, "the hub states no digest of config.json"),
    ({"lfs": "x"}, "with lfs 'x'; expected an object with sha256"),
    ({"lfs": []}, "with lfs a JSON list; expected an object with sha256"),
    ({"lfs": {}}, "the hub states no digest of config.json"),
    ({"lfs": {"sha256": "../../escaped"}}, "with sha256 '../../escaped'; expected 64 hexadecimal digits"),
    ({"lfs": {"sha256": "0" * 40}}, "expected 64 hexadecimal digits"),
    ({"lfs": {"sha256": ["0" * 64]}}, "with sha256 a JSON list; expected 64 hexadecimal digits"),
    ({"rfilename": "Tokenizer.json"}, "the hub lists tokenizer.json twice"),
    ({"rfilename": "tokenizer.json"}, "the hub lists tokenizer.json twice"),
]


def test_odd_listings(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.add(REPOSITORY, files)
    for hub.listing, line in LISTINGS:
        said = machine.refuses("pull", REPOSITORY)
        assert line in said
        assert len(said) < 600
    hub.listing = None
    for entry, line in ENTRIES:
        hub.entries["config.json"] = entry
        said = machine.refuses("pull", REPOSITORY)
        assert line in said
        assert len(said) < 600
    assert not machine.lock.exists()
    assert not hub.fetched(WEIGHTS)
    _check_nothing_escaped(machine)


def test_a_listing_that_is_right_about_odd_things(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """An empty file, more keys than are read, an entry that is not wanted and says nothing."""
    hub.add(REPOSITORY, files | {"empty.json": b""})
    hub.entries = {"README.md": {"size": None, "blobId": None}, "config.json": {"lfs": None, "xetHash": 7}}
    folder = machine.pull(REPOSITORY)
    assert (folder / "empty.json").read_bytes() == b""
    assert machine.resolves() is None


def test_a_time_limit_that_is_none(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """huggingface_hub itself ends in a traceback when it is imported."""
    hub.add(REPOSITORY, files)
    machine.pull(REPOSITORY)
    asked = len(hub.requests)
    wrong = [("HF_HUB_DOWNLOAD_TIMEOUT", value) for value in ("x", "", "-1", "1e400", "99999999999999999999")]
    for variable, value in [*wrong, ("HF_HUB_ETAG_TIMEOUT", "10 s")]:
        line = machine.refuses("pull", REPOSITORY, settings={variable: value})
        assert line == f"kvant: error: {variable} is {value!r}; expected a whole number of seconds, at most 86400"
        found = machine.run("find", REPOSITORY, settings={variable: value})
        assert found.stdout == f"{line.removeprefix('kvant: error: ')}\n"
    # huggingface_hub is in that process already. In another one it is not.
    assert line == machine.refuses("pull", REPOSITORY, HF_HUB_ETAG_TIMEOUT="10 s")
    assert len(hub.requests) == asked


CONFIGS = [
    *(b'{"num_hidden_layers": %s, "num_attention_heads": 9, "hidden_size": 576}' % value for value in (
        b'"x"', b'"9"', b"1e999", b"NaN", b"-1", b"true", b"[9]", b"1" + b"0" * 400, b"9.5", b"{}", b"null",
    )),
    b'{"num_hidden_layers": 9, "num_attention_heads": "9", "hidden_size": 576}',
    b'{"num_hidden_layers": "9", "num_attention_heads": 3000000000, "head_dim": 1}',
    b'{"num_hidden_layers": "9", "num_attention_heads": 1, "head_dim": 3000000000, "max_position_embeddings": 1e999}',
    b'{"num_hidden_layers": 9, "num_attention_heads": 9, "hidden_size": 576, "num_key_value_heads": "x"}',
    b'{"num_hidden_layers": 9, "num_attention_heads": 9, "hidden_size": 576, "head_dim": [1]}',
    b'{"num_hidden_layers": 9, "num_attention_heads": 9, "hidden_size": "576"}',
    b'{"num_hidden_layers": 9, "num_attention_heads": 0, "hidden_size": 576}',
    b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a": 1, "a": 2}', b"9" * 100_000,
]  # fmt: skip


def test_models_shows_whatever_was_pulled(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """A row of a hostile config says what is known, its bytes, and leaves the rest out."""
    small = {"config.json": b"", WEIGHTS: b"weights"}
    for number, config in enumerate(CONFIGS):
        hub.add(f"somebody/odd-{number}", small | {"config.json": config})
        machine.pull(f"somebody/odd-{number}")
    done = machine.run("models", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) < 40_000
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    for number, config in enumerate(CONFIGS):
        row = rows[f"somebody/odd-{number}"]
        assert (row["cache_bytes_per_token"], row["context"], row["here"]) == (None, None, "yes"), config[:100]
        assert row["bytes"] == len(config) + 7
    assert rows["pocket"]["cache_bytes_per_token"]
    assert machine.run("models").returncode == 0


def test_a_file_in_a_subfolder(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    """A tokenizer's loader reads more templates from one; they were not verified."""
    hub.add(REPOSITORY, files | {"additional_chat_templates/x.jinja": b"{{ 1 }}"})
    folder = machine.pull(REPOSITORY)
    assert not (folder / "additional_chat_templates").exists()
    assert machine.resolves() is None
    for name in ("additional_chat_templates", "Additional_Chat_Templates"):
        (folder / name).mkdir()
        (folder / name / "x.jinja").write_text("{{ 1 }}")
        assert f"{name}: not among the files that were pulled and verified; remove it" in (machine.resolves() or "")
        assert "1 of 6 files are wrong" in machine.refuses("pull", "--verify")
        (folder / name / "x.jinja").unlink()
        (folder / name).rmdir()
    (folder / "additional_chat_templates").symlink_to(machine.home)
    assert "not among the files" in (machine.resolves() or "")
    (folder / "additional_chat_templates").unlink()
    (folder / "ADDED_TOKENS.JSON").write_text("{}")  # on a disk where capital letters do not count
    assert "not among the files" in (machine.resolves() or "")


def test_the_address_of_the_hub(machine: Machine, hub: Hub, files: dict[str, bytes]) -> None:
    hub.add(REPOSITORY, files)
    few = ("x", "ftp://127.0.0.1", "http://[")  # no scheme, another, no host: each in a process of its own
    for address in count(few, (*few, "", "http://", "file:///etc")):
        line = machine.refuses("pull", REPOSITORY, HF_ENDPOINT=address)
        assert REPOSITORY in line
