"""Restore what a run has changed in its Python process."""

import signal
import threading
from contextlib import contextmanager

import datasets
import transformers
import wandb


@contextmanager
def restore_afterwards():
    """Restore the signal handlers and the logging after a run. If the run fails, end its W&B run.

    A notebook, or a sweep in one process, goes on after the run. Without this, Ctrl-C would not
    interrupt a cell any more, and the next run would write into the W&B run of one that failed.
    """
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            handlers[number] = signal.getsignal(number)
    verbosity = transformers.logging.get_verbosity()
    transformers_bars = transformers.logging.is_progress_bar_enabled()
    datasets_bars = not datasets.are_progress_bars_disabled()
    users_run = wandb.run  # without --track, a W&B run that the caller has started stays open
    try:
        yield
    except BaseException as error:
        if wandb.run is not users_run:
            wandb.finish(exit_code=getattr(error, "code", 1))  # SystemExit has a code
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        transformers.logging.set_verbosity(verbosity)
        if transformers_bars:
            transformers.logging.enable_progress_bar()
        if datasets_bars:
            datasets.enable_progress_bars()
