import pytest

from ziggurat.errors import PlanError
from ziggurat.ops.row_formats import RowFormat
from ziggurat.placements import Placement
from ziggurat.planning.problem import Assignment, PlanningProblem, TableProfile


def _problem(**changes) -> PlanningProblem:
    settings = {
        "tables": (TableProfile(name="a", num_rows=10, dim=32, optimizer_bytes_per_row=4),),
        "num_devices": 4,
        "memory_bytes": (1000,),
        "placements": tuple(Placement),
    }
    return PlanningProblem(**{**settings, **changes})


def test_bytes_are_weights_and_state_of_every_part():
    problem = _problem()
    parts = problem.shards(0, Assignment(placement=Placement.COLUMN_WISE, devices=(0, 2)))
    assert [part.memory_bytes for part in parts] == [10 * 16 * 4 + 10 * 4] * 2
    rows = problem.shards(0, Assignment(placement=Placement.ROW_WISE, devices=(0, 1, 2, 3)))
    assert [(part.num_rows, part.dim, part.pooling_factor) for part in rows] == [(3, 32, 0.25)] * 4
    adam = TableProfile(name="a", num_rows=10, dim=4, optimizer_bytes_per_element=8)
    assert adam.bytes_of(num_rows=10, dim=4) == 10 * 4 * 12


def test_bytes_and_cuts_are_those_of_the_format_of_the_rows():
    split, int8 = (
        TableProfile(name="a", num_rows=10, dim=32, row_format=kept, optimizer_bytes_per_row=4)
        for kept in (RowFormat.SPLIT_BF16, RowFormat.INT8)
    )
    assert split.bytes_of(num_rows=10, dim=16) == 10 * (2 * 16 + 2 * 16 + 4)
    assert int8.bytes_of(num_rows=10, dim=32) == 10 * (32 + 4 + 4)
    assert _problem(tables=(split,)).column_parts(0) == (1, 2, 4)
    assert _problem(tables=(int8,)).column_parts(0) == (1,), "the ends of a row belong to all of it"


def test_the_reserve_is_kept_back_on_every_device():
    assert _problem(memory_bytes=(1000, 900, 800, 700), reserve_bytes=100).room_bytes == (900, 800, 700, 600)


def test_cuts_stay_inside_columns_devices_and_towers():
    assert _problem().column_parts(0) == (1, 2, 4)
    assert _problem(column_multiple=16).column_parts(0) == (1, 2)
    assert _problem(max_parts=2).column_parts(0) == (1, 2)
    assert _problem(placements=(Placement.TABLE_WISE,)).column_parts(0) == (1,)
    pinned = _problem(allowed=((3, 2),))
    assert pinned.devices_of(0) == (2, 3)
    assert pinned.column_parts(0) == (1, 2)
    assert {option.devices for option in pinned.spread_options(0)} == {(2, 3)}


def test_rows_over_one_host_are_an_option_a_host():
    found = [
        option.devices
        for option in _problem(devices_per_host=2).spread_options(0)
        if option.placement is Placement.TABLE_ROW_WISE
    ]
    assert found == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    "changes",
    [
        {"tables": ()},
        {"tables": (TableProfile(name="a", num_rows=1, dim=4),) * 2},
        {"memory_bytes": (1, 2)},
        {"allowed": ((4,),)},
        {"allowed": (None, None)},
        {"num_devices": 0},
        {"tables": (TableProfile(name="a", num_rows=0, dim=4),)},
    ],
)
def test_contradictions_are_refused(changes):
    with pytest.raises(PlanError, match="planning problem"):
        _problem(**changes)
