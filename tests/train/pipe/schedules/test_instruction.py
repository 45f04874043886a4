from __future__ import annotations

import pytest

from vescale_train.errors import ConfigError
from vescale_train.pipe.schedules import (
    parse_instructions,
    register_instruction,
    schedule_from_text,
    unregister_instruction,
    validate_pipeline_schedule,
    with_communication,
)
from vescale_train.pipe.schedules.instruction import BUILT_IN, handler_of, kind_of


def do_nothing(instruction, context):
    """Be an instruction."""


@pytest.fixture
def log_memory():
    register_instruction("LOG_MEMORY", do_nothing, meaning="note memory", microbatch="optional")
    yield "LOG_MEMORY"
    unregister_instruction("LOG_MEMORY")


@pytest.mark.parametrize("text", ["2F0", "11B13", "1REDUCE_GRAD", "0RECV_B3", "(0F3;1B2)OVERLAP_F_B"])
def test_an_instruction_is_written_as_it_is_read(text):
    assert [str(each) for each in parse_instructions(text)] == [text]


def test_a_users_instruction_stays_in_its_place(log_memory):
    schedule = schedule_from_text("0F0,0LOG_MEMORY,0B0\n1F0,1LOG_MEMORY0,1B0\n")
    validate_pipeline_schedule(schedule)
    complete = with_communication(schedule, unshard=True)
    validate_pipeline_schedule(complete)
    for rank in (0, 1):
        cells = [str(leaf) for leaf in complete.instructions(rank)]
        place = next(n for n, cell in enumerate(cells) if "LOG" in cell)
        assert f"{rank}F0" in cells[:place]
        assert f"{rank}B0" in cells[place:]
    assert kind_of(log_memory).meaning == "note memory"
    assert handler_of(log_memory) is not None


def test_registered_again_it_replaces_and_forgotten_it_is_unknown(log_memory):
    def other(instruction, context):
        """Do nothing else."""

    register_instruction(log_memory, other)
    assert handler_of(log_memory) is other
    unregister_instruction(log_memory)
    assert kind_of(log_memory) is None
    unregister_instruction(log_memory)


@pytest.mark.parametrize("name", ["f", "_A", "A_", "A1", "", "A B"])
def test_names_that_cannot_be_written_are_refused(name):
    with pytest.raises(ConfigError, match="names are capital letters"):
        register_instruction(name, do_nothing)


@pytest.mark.parametrize("kind", BUILT_IN)
def test_built_in_instructions_cannot_be_replaced(kind):
    with pytest.raises(ConfigError, match="it is built in"):
        register_instruction(kind.name, do_nothing)
    unregister_instruction(kind.name)
    assert kind_of(kind.name) is kind
