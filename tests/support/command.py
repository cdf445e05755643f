"""The command as a process."""

import os
import subprocess
import sys

COMMAND = [sys.executable, "-m", "kvant"]
QUESTION = "Tell me a story about a fox named Pip."


def run(*arguments: str, stdin: str | bytes = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as on a machine without a network."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [*COMMAND, *arguments],
        input=data,
        capture_output=True,
        timeout=120,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
