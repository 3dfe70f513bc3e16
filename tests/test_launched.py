"""The variables of a launcher, which one module reads by one rule."""

import pytest

from fineprune.errors import InputError
from fineprune.launcher import Launched, check_not_launched, launched

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
COMPLETE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}


@pytest.fixture
def environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def change(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return change


def test_without_a_launcher_a_process_is_alone(environment):
    assert launched() == Launched(0, 1, None, 1)
    environment(RANK="", WORLD_SIZE=" ", LOCAL_WORLD_SIZE="")
    assert launched() == Launched(0, 1, None, 1)
    check_not_launched("this", "nothing")


def test_a_rank_knows_its_place(environment):
    environment(**COMPLETE, LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    assert launched() == Launched(1, 2, 0, 2)
    with pytest.raises(InputError, match="expected fineprune inspect without torchrun, got 2 proc"):
        check_not_launched("fineprune inspect", "nothing")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"RANK": "1"}, "got RANK=1 without WORLD_SIZE: start it with torchrun, or unset RANK"),
        ({"WORLD_SIZE": "2"}, "without RANK, MASTER_ADDR, MASTER_PORT: start it with torchrun"),
        ({**COMPLETE, "MASTER_PORT": ""}, "got WORLD_SIZE=2 without MASTER_PORT: start it"),
        ({**COMPLETE, "RANK": "2"}, "expected RANK below WORLD_SIZE=2, got 2"),
        ({"WORLD_SIZE": "two"}, "the variable WORLD_SIZE to be a whole number, .* got 'two'"),
        ({"WORLD_SIZE": "-1"}, "the variable WORLD_SIZE to be a whole number, .* got '-1'"),
    ],
)
def test_variables_that_do_not_fit_together_are_refused(values, said, environment):
    environment(**values)
    with pytest.raises(InputError, match=said):
        launched()
