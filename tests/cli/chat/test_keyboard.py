"""The keyboard of a chat that several ranks answer."""

import os
import pty
import signal

import pytest

from kvant.cli.chat.keyboard import Keyboard


@pytest.mark.parametrize("ignored", [True, False])
def test_ctrl_z_is_ignored_where_the_launcher_ignores_it(ignored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that stops is a lost one, and the conversation with it."""
    master, slave = pty.openpty()
    before = signal.signal(signal.SIGTSTP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with open(slave) as terminal:
            monkeypatch.setattr("sys.stdin", terminal)
            with Keyboard().kept():
                assert (signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN) == ignored
        assert signal.getsignal(signal.SIGTSTP) is (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGTSTP, before)
        os.close(master)
