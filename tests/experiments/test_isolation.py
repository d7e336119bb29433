"""A function that is called in a process of its own gives its result, its error, or how its process ended."""

import math
import os
import signal

import pytest

from experiments.measuring.isolation import fresh, isolated


def test_the_result_is_that_of_another_process():
    assert isolated([], os.getppid) != os.getppid()
    assert isolated([], math.gcd, 12, 18) == 6


def test_a_new_interpreter_has_the_variables_of_the_call_which_are_gone_here_after_it():
    assert fresh({"OF_THE_CALL": "1"}, os.getenv, "OF_THE_CALL") == "1"
    assert os.getenv("OF_THE_CALL") is None


def test_an_error_is_raised_here_with_the_traceback_of_there():
    with pytest.raises(ValueError, match="math domain error") as error:
        isolated([], math.sqrt, -1.0)
    assert "in _answer" in "".join(error.value.__notes__)


def test_a_process_that_is_killed_is_named_with_its_exit_code():
    with pytest.raises(RuntimeError, match=r"ended with exit code -9; .* Pass smaller sizes"):
        isolated([], signal.raise_signal, signal.SIGKILL)
