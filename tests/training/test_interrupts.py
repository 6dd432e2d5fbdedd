"""Signals stop a run between its steps, and never within one."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from ligermodels.training import processes as module
from ligermodels.training.processes import Interrupts

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def defaults():
    """Give each signal the handler that a fresh process has, and check that it is put back."""
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    for signum, handler in before.items():
        signal.signal(signum, handler)


def send(signum):
    os.kill(os.getpid(), signum)


def test_only_a_second_press_of_ctrl_c_breaks_off(monkeypatch):
    with pytest.raises(KeyboardInterrupt), Interrupts() as stop, stop.held():
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        send(signal.SIGINT)  # it comes with the first signal
        monkeypatch.setattr(module, "_SAME_PRESS", -1.0)
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_handlers_of_the_caller_are_left_alone():
    came = []
    signal.signal(signal.SIGTERM, lambda *_: came.append(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts() as stop:
        send(signal.SIGTERM)
        send(signal.SIGINT)
    assert came == [1] and stop.signum is None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_another_thread_than_the_main_one_gets_no_handlers():
    found = []

    def enter():
        with Interrupts():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


def test_a_run_that_will_stop_says_so(capfd):
    with pytest.raises(KeyboardInterrupt), Interrupts(verbose=True) as stop, stop.held():
        send(signal.SIGINT)
    assert "stopping soon" in capfd.readouterr().err
