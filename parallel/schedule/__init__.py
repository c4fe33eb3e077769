"""Pipeline schedules as data: made, validated, packed into ticks, simulated, searched and drawn."""

from parallel.schedule.registry import SCHEDULES, make, make_forward
from parallel.schedule.search import search
from parallel.schedule.simulate import simulate
from parallel.schedule.table import Action, ScheduleError, Table, place, stage_of
from parallel.schedule.tick_search import best_packing, search_ticks
from parallel.schedule.ticks import TickTable, best_ticks, pack

__all__ = [
    "SCHEDULES",
    "Action",
    "ScheduleError",
    "Table",
    "TickTable",
    "best_packing",
    "best_ticks",
    "make",
    "make_forward",
    "pack",
    "place",
    "search",
    "search_ticks",
    "simulate",
    "stage_of",
]
