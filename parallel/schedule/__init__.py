"""Pipeline schedules as data: made, validated, packed into ticks, simulated, searched and drawn."""

from parallel.schedule.registry import make, make_forward
from parallel.schedule.table import Action, ScheduleError, Table, place, stage_of
from parallel.schedule.ticks import TickTable, pack

__all__ = ["Action", "ScheduleError", "Table", "TickTable", "make", "make_forward", "pack", "place", "stage_of"]
