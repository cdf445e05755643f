"""Run coding agents themselves against kvant serve: a hello, a tool and its result, a continued session,
another one.

Usage: python scripts/clients/coding.py NODE_FOLDER
NODE_FOLDER has a node_modules of coding/package.json. The server has a scripted model. Everything is in a
network namespace with loopback alone, with an empty home and a dummy key. Ends with exit code 1 when a check
fails, and with a line and 0 where no namespace can be made, or an agent is not there.
"""

import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import scripted
from run import figures, serving

NAMESPACE = "KVANT_AGENTS_NAMESPACE"
MODEL = "scripted"
# Codex gives models that it knows other tools: one that takes a patch; all of them in an item of the input.
KNOWN = {"use the patch": "gpt-5.5", "use the tool of a newer model": "gpt-5.6-sol"}
STEP_S = 180
SHARED = 0.8  # of a second session's prompt, at least
COUNTERS = ("kvant_prompt_tokens_total", "kvant_cached_tokens_total", "kvant_answers_total")
QUIET: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}


@dataclass(frozen=True)
class Agent:
    """An agent's command, what goes before its prompts, and what it is told of the server, {} being its
    address.
    """

    command: str
    start: tuple[str, ...]
    again: tuple[str, ...]
    environ: tuple[str, ...] = ()


CODEX = "model_providers.kvant={{name='kvant',base_url='{}/v1',wire_api='responses'}}"
CODEX_OPTIONS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", MODEL)
CODEX_OPTIONS += ("-c", "model_provider=kvant", "-c", CODEX)
PROVIDER = '{{"npm":"@ai-sdk/openai-compatible","options":{{"baseURL":"{}/v1","apiKey":"any"}},"models":{{"scripted":{{}}}}}}'
OPENCODE = f'OPENCODE_CONFIG_CONTENT={{{{"provider":{{{{"kvant":{PROVIDER}}}}}}}}}'
AGENTS = {
    "Claude Code": Agent(
        "claude",
        ("--allowedTools", "Bash(echo:*)", "-p"),
        ("--allowedTools", "Bash(echo:*)", "-c", "-p"),
        (
            "ANTHROPIC_BASE_URL={}",
            "ANTHROPIC_AUTH_TOKEN=any",
            *(
                f"ANTHROPIC_{kind}MODEL={MODEL}"
                for kind in ("", "DEFAULT_HAIKU_", "DEFAULT_SONNET_", "DEFAULT_OPUS_")
            ),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1",
            "DISABLE_TELEMETRY=1",
        ),
    ),
    "opencode": Agent(
        "opencode", ("run", "-m", f"kvant/{MODEL}"), ("run", "-c", "-m", f"kvant/{MODEL}"), (OPENCODE,)
    ),
    "Qwen Code": Agent(
        "qwen",
        ("-y", "-p"),
        ("-y", "--continue", "-p"),
        ("OPENAI_BASE_URL={}/v1", "OPENAI_API_KEY=any", f"OPENAI_MODEL={MODEL}"),
    ),
    "Codex": Agent("codex", ("exec", *CODEX_OPTIONS), ("exec", *CODEX_OPTIONS, "resume", "--last")),
}


def main() -> int:
    """Every agent, each with a server and a home of its own."""
    tools = Path(sys.argv[1]) / "node_modules" / ".bin"
    if NAMESPACE not in os.environ:
        for unshare in (["unshare", "-n"], ["unshare", "-rn"]):
            if (
                shutil.which("unshare")
                and subprocess.run([*unshare, "true"], capture_output=True).returncode == 0
            ):
                inside = os.environ | {NAMESPACE: "1"}
                return subprocess.run([*unshare, sys.executable, *sys.argv], env=inside).returncode
        print("skipped: the agents, as no network namespace can be made here")
        return 0
    _raise_loopback()
    failed = 0
    for name, agent in AGENTS.items():
        if not (tools / agent.command).exists():
            print(f"skipped: {name}, which {tools.parent.parent} has not")
            continue
        failed += run(name, agent, tools / agent.command)
    return failed > 0


def run(name: str, agent: Agent, command: Path) -> int:
    """One agent's steps. Returns how many failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        home, model = Path(scratch) / "home", Path(scratch) / "model"
        home.mkdir()
        scripted.write(model)
        with serving(
            Path(scratch) / "log", "--model", str(model), "--alias", MODEL, "--alias", "gpt-*"
        ) as url:
            kept = {key: os.environ[key] for key in ("PATH", "LANG", "TERM") if key in os.environ}
            given = dict(each.format(url).split("=", 1) for each in agent.environ)
            environ = kept | given | {"HOME": str(home), "NO_PROXY": "127.0.0.1"}
            version = subprocess.run([command, "--version"], env=environ, **QUIET).stdout.split()
            said = f"{name} {next((word for word in version if word[0].isdigit()), '')}"
            steps = [
                ("says hello", agent.start, "hello"),
                ("runs a tool and reads its result", agent.start, "use the tool"),
                ("goes on with a session", agent.again, "hello again"),
                ("begins another session with what it has read", agent.start, "another"),
            ]
            if name == "Codex":
                for prompt, known in KNOWN.items():
                    options = tuple(known if option == MODEL else option for option in agent.start)
                    steps.append((f"does as {known}: {prompt}", options, prompt))
            for step, options, prompt in steps:
                before = _counters(url)
                arguments = [option.format(url) if option == CODEX else option for option in options]
                done = subprocess.run(
                    [command, *arguments, prompt], cwd=home, env=environ, timeout=STEP_S, **QUIET
                )
                after = _counters(url)
                fed, cached, requests = (after[key] - before.get(key, 0) for key in COUNTERS)
                wrong = [key for key in after if 'status="4' in key or 'status="5' in key]
                right = done.returncode == 0 and scripted.SAID in done.stdout and not wrong
                right &= requests >= (2 if "use the" in prompt else 1)
                right &= prompt in ("hello", *KNOWN) or cached >= SHARED * fed
                patched = [path.read_text() for path in home.glob(scripted.PATCHED)]
                right &= prompt != "use the patch" or patched == ['one "two"\n']
                mark = "ok    " if right else "FAILED"
                print(f"{mark} {said} {step}: {cached:.0f} of {fed:.0f} tokens from the cache")
                failed += not right
                if not right:
                    ended = {"wrong": wrong, "out": done.stdout[-1500:], "err": done.stderr[-1500:]}
                    print(json.dumps(ended, indent=1))
    return failed


def _counters(url: str) -> dict[str, float]:
    """The server's counters; answers of all reasons together."""
    with httpx2.Client(base_url=url, trust_env=False) as client:
        found = figures(client)
    answers = sum(value for key, value in found.items() if key.startswith("kvant_answers_total{"))
    return found | {"kvant_answers_total": answers}


def _raise_loopback() -> None:
    """Set the flag that loopback is up, which it is not in a new namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 0x1))  # SIOCSIFFLAGS, IFF_UP


if __name__ == "__main__":
    sys.exit(main())
