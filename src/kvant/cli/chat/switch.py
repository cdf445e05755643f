"""Another model in the middle of a conversation."""

import gc
from dataclasses import replace

import mlx.core as mx

from kvant.cli import options, ranks
from kvant.cli.chat.talk import Talk, notice
from kvant.cli.fitting import plan_that_fits
from kvant.cli.session import RunOptions, open_session
from kvant.engine.load import find_model
from kvant.errors import ModelError
from kvant.machine import this_machine
from kvant.tools.plan import read_folder


def switch_model(talk: Talk, name: str) -> None:
    """Load another model with a reservation of its own, and go on with it; the turns are fed to it with the next one.

    Memory is planned first. Where both models fit, the old one stays until the new one is there. Where only one fits,
    the old one makes room, and is loaded again if the new one cannot be. An adapter and a
    draft model are not for another model.

    Raises:
        KvantError, BadValueError, ArgumentError: as :func:`kvant.cli.session.open_session` and
            :meth:`kvant.cli.chat.talk.Talk.use`. The old model is there then, unless it could not be loaded again:
            ``talk.has_model`` says so.
    """
    if ranks.guard() is not None:
        raise ModelError("another model on several ranks is another run; end the chat and start it with that model")
    before = talk.run
    wanted = replace(before, model=name, adapter_path=None, draft_model=None, num_draft_tokens=None)
    if before.draft_model is not None:
        notice(f"{name} goes without the draft model, {before.draft_model}")
    if _both_fit(wanted):
        talk.use(wanted, open_session(wanted, announce=False))
        _give_back()
        return
    notice(f"{before.model} makes room for {name}")
    talk.leave_model()
    _give_back()
    try:
        talk.use(wanted, open_session(wanted, announce=False))
        return
    except BaseException as error:
        failure = error.with_traceback(None)  # its frames hold what was loaded
    _give_back()
    talk.use(before, open_session(before, announce=False))
    notice(f"{before.model} is loaded again")
    raise failure


def _both_fit(wanted: RunOptions) -> bool:
    """Whether a model fits beside what is loaded now; an error where it does not even fit alone."""
    machine = this_machine()
    checkpoint = read_folder(find_model(wanted.model))
    planned = plan_that_fits(checkpoint, wanted.settings(), options.kv_size(wanted.max_kv_size), machine)
    return planned.total + mx.get_active_memory() <= machine.limit_bytes


def _give_back() -> None:
    """Return the memory of a model that nobody uses any more."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    mx.clear_cache()
