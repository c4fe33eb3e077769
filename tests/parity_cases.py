"""The committed list of cases in which pipelined training is compared with the plain step.

Every pair of values of two columns occurs in some row (a test checks it), and rows with three axes of 2 use all 8 devices.
A row with idle=skip and one chunk a rank stands for all three schedules with one chunk: they share its compiled program, as
the table is an argument of it. Microbatches are relative to the p stages; `%p` is p + p / 2 (3 without a pipeline)."""

import dataclasses
import itertools

from parallel.schedule.registry import find

COLUMNS = dict(
    schedule=("gpipe", "1f1b", "eager-1f1b", "interleaved/2", "interleaved/3"),
    backward=("whole", "split"),
    mesh=(
        "pipe2",
        "pipe4 tensor2",
        "pipe4 data2",
        "pipe2 data2 tensor2",
        "replica2 data2 pipe2",
        "replica2 pipe2 tensor2",
        "data2",
    ),
    microbatches=("<p", "=p", "%p", "4p"),
    remat=("none", "selective", "full"),
    idle=("skip", "compute"),
    layers=("even", "uneven"),
    shape=("llama", "gpt2"),
    tied=("tied", "untied"),
    zero=("zero0", "zero1"),
)
ONE_CHUNK = COLUMNS["schedule"][:3]

TABLE = """
gpipe         | split | pipe2                   | 4p  | selective | skip    | uneven | gpt2  | tied   | zero1
gpipe         | whole | replica2 data2 pipe2    | <p  | none      | skip    | even   | llama | untied | zero0
interleaved/2 | whole | pipe4 data2             | %p  | full      | compute | uneven | llama | tied   | zero0
interleaved/3 | split | data2                   | =p  | full      | compute | even   | gpt2  | untied | zero1
interleaved/2 | whole | pipe4 tensor2           | %p  | selective | skip    | even   | gpt2  | untied | zero1
interleaved/3 | split | pipe2 data2 tensor2     | <p  | none      | compute | uneven | gpt2  | tied   | zero0
gpipe         | whole | replica2 pipe2 tensor2  | =p  | full      | skip    | uneven | llama | untied | zero1
interleaved/3 | whole | replica2 pipe2 tensor2  | 4p  | selective | compute | even   | llama | tied   | zero0
gpipe         | split | data2                   | %p  | none      | skip    | uneven | llama | tied   | zero0
interleaved/2 | split | replica2 data2 pipe2    | =p  | none      | compute | uneven | gpt2  | tied   | zero1
eager-1f1b    | split | pipe4 data2             | <p  | selective | skip    | even   | gpt2  | untied | zero1
gpipe         | whole | pipe2 data2 tensor2     | 4p  | full      | skip    | even   | llama | untied | zero1
1f1b          | split | pipe4 tensor2           | 4p  | none      | compute | uneven | llama | tied   | zero0
interleaved/2 | whole | pipe2                   | <p  | full      | compute | even   | llama | untied | zero0
interleaved/3 | split | replica2 pipe2 tensor2  | %p  | none      | skip    | even   | gpt2  | tied   | zero1
interleaved/2 | whole | data2                   | =p  | selective | skip    | even   | llama | tied   | zero0
gpipe         | split | pipe4 tensor2           | <p  | full      | skip    | even   | gpt2  | untied | zero1
eager-1f1b    | whole | replica2 data2 pipe2    | %p  | selective | compute | even   | llama | tied   | zero1
interleaved/3 | whole | pipe2                   | %p  | none      | compute | uneven | gpt2  | untied | zero1
interleaved/3 | split | replica2 data2 pipe2    | 4p  | full      | compute | uneven | llama | untied | zero1
interleaved/2 | whole | pipe2 data2 tensor2     | =p  | selective | skip    | uneven | llama | tied   | zero0
interleaved/2 | whole | pipe4 data2             | 4p  | none      | compute | even   | gpt2  | tied   | zero0
interleaved/2 | whole | replica2 pipe2 tensor2  | <p  | full      | skip    | even   | gpt2  | tied   | zero1
interleaved/3 | split | pipe4 tensor2           | =p  | full      | compute | even   | gpt2  | untied | zero0
interleaved/3 | split | pipe4 data2             | =p  | selective | skip    | even   | llama | tied   | zero1
gpipe         | split | data2                   | 4p  | none      | compute | uneven | gpt2  | tied   | zero0
gpipe         | whole | pipe2 data2 tensor2     | %p  | selective | compute | uneven | gpt2  | tied   | zero1
interleaved/3 | split | data2                   | <p  | full      | skip    | even   | gpt2  | tied   | zero1
interleaved/3 | whole | pipe2                   | =p  | none      | compute | even   | llama | tied   | zero1
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """One row; `schedule` is NAME or NAME/CHUNKS, three chunks with groups of one microbatch more than stages."""

    schedule: str
    backward: str
    mesh: str
    microbatches: str
    remat: str
    idle: str
    layers: str
    shape: str
    tied: str
    zero: str

    def __str__(self) -> str:
        return "-".join(dataclasses.astuple(self)).replace(" ", "+")

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis to size."""
        return {axis[:-1]: int(axis[-1]) for axis in self.mesh.split()}

    @property
    def stages(self) -> int:
        return self.sizes.get("pipe", 1)

    @property
    def chunks(self) -> int:
        name, _, chunks = self.schedule.partition("/")
        return int(chunks or (2 if name.endswith(".csv") else find(name).chunks))

    @property
    def number_of_microbatches(self) -> int:
        p = self.stages
        return {"<p": max(p // 2, 1), "=p": p, "%p": p + p // 2 if p > 1 else 3, "4p": 4 * p}[self.microbatches]

    @property
    def number_of_layers(self) -> int:
        """even: as many in every chunk; uneven: one more than stages, or one less (an empty chunk) with several chunks."""
        stages = self.stages * self.chunks
        if self.layers == "even":
            return stages if self.chunks > 1 else 2 * stages
        return stages - 1 if self.chunks > 1 else stages + 1

    def schedules(self) -> list["Case"]:
        """The cases that share this one's compiled program."""
        if self.idle == "skip" and self.schedule in ONE_CHUNK:
            return [dataclasses.replace(self, schedule=name) for name in ONE_CHUNK]
        return [self]


CASES = [Case(*(cell.strip() for cell in row.split("|"))) for row in TABLE.strip().splitlines()]


def missing_pairs() -> set[tuple[str, str, str, str]]:
    """Pairs (column, value, column, value) that occur in no case."""
    rows = [dataclasses.asdict(case) for row in CASES for case in row.schedules()]
    missing = set()
    for (a, xs), (b, ys) in itertools.combinations(COLUMNS.items(), 2):
        there = {(row[a], row[b]) for row in rows}
        missing |= {(a, x, b, y) for x in xs for y in ys if (x, y) not in there}
    return missing
