"""Tables that no generator makes."""

from parallel.schedule.table import Action, Table, stage_of


def v_table(stages: int, microbatches: int, backward: str) -> Table:
    """A V placement: all forwards as they arrive, then all backwards the other way round; split: every W as late as it can."""

    def rank(r: int) -> tuple[Action, ...]:
        units = [(c, i) for c in range(2) for i in range(microbatches)]
        units.sort(key=lambda unit: 2 * unit[1] + stage_of("v", stages, r, unit[0]))
        kinds = ("BW",) if backward == "whole" else ("B", "W")
        back = [Action(kind, *unit) for kind in kinds for unit in reversed(units)]
        return (*(Action("F", *unit) for unit in units), *back)

    return Table("by hand", stages, 2, microbatches, "v", tuple(rank(r) for r in range(stages))).validate()
