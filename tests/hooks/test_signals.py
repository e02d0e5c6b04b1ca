from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from hezar_train.hooks import StopFlag

WATCHED = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in WATCHED}
    yield
    assert {number: signal.getsignal(number) for number in WATCHED} == before


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_sets_the_flag_and_nothing_else_happens(number: signal.Signals, code: int) -> None:
    with StopFlag() as flag:
        assert flag.signal is None
        send(number)
        assert flag.signal is number
        assert flag.exit_code == code


def test_the_user_is_told_what_happens_next(capfd: pytest.CaptureFixture[str]) -> None:
    with StopFlag():
        send(signal.SIGINT)
    said = capfd.readouterr().err
    assert said == "\nSIGINT: finishing this update, then saving. Ctrl-C again leaves at once.\n"


def test_a_second_ctrl_c_leaves_at_once() -> None:
    with StopFlag() as flag:
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert flag.signal is signal.SIGINT


def test_ctrl_c_after_a_termination_leaves_at_once() -> None:
    with StopFlag():
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_second_termination_changes_nothing() -> None:
    with StopFlag() as flag:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert flag.exit_code == 143


def test_handlers_of_the_user_are_put_back_also_after_an_error() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with pytest.raises(ZeroDivisionError), StopFlag():
            _ = send(signal.SIGTERM) or 1 / 0
        assert got == []
        send(signal.SIGTERM)
        assert got == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_flag_that_was_set_is_clear_in_the_next_run() -> None:
    flag = StopFlag()
    with flag:
        send(signal.SIGTERM)
    assert flag.signal is None
    with flag:
        assert flag.signal is None
        send(signal.SIGINT)
        assert flag.exit_code == 130


def test_another_thread_sets_no_handlers() -> None:
    seen: list[object] = []

    def work() -> None:
        with StopFlag():
            seen.extend(signal.getsignal(number) for number in WATCHED)

    before = [signal.getsignal(number) for number in WATCHED]
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == before


def test_a_flag_used_in_the_main_thread_works_in_another_one_later() -> None:
    flag, failures = StopFlag(), []
    with flag:
        pass

    def work() -> None:
        try:
            with flag:
                pass
        except ValueError as error:  # what Python says to a thread that sets a handler
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []


@pytest.mark.parametrize("number", WATCHED)
def test_a_forked_child_meets_signals_as_if_there_were_no_flag(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with StopFlag() as flag:
        child = os.fork()
        if child == 0:
            try:
                send(number)
                time.sleep(5)  # the signal comes first
            except KeyboardInterrupt:
                os._exit(7)
            os._exit(8)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert flag.signal is None
    assert status == (7 if number == signal.SIGINT else -signal.SIGTERM)
    assert capfd.readouterr().err == ""
