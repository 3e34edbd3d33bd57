"""What sweeps and result folders give."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd


class Status(IntEnum):
    """How a cell came out over all its visits; its rate is a number only if MEASURED."""

    NOT_VISITED = 0
    MEASURED = 1
    SKIPPED = 2
    FAILED = 3
    IMPLAUSIBLE = 4


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_frame() needs pandas: pip install pandas") from error
    return pandas


@dataclass(frozen=True, eq=False, repr=False)
class Matrix:
    """The rates of one sweep under one load: sizes × rows × columns.

    ``rows`` and ``columns`` are CPUs and devices of copies, CPUs of rank 0 and of rank 1 of pairs;
    ``row_nodes`` and ``column_nodes`` their NUMA nodes, ``None`` where unknown. The arrays are the
    memory that the sweep filled, not a copy of it; ``status`` is one, of a byte per cell.
    """

    sweep: str
    """``h2d``, ``d2h``, ``bidirectional`` or ``core_pair``."""
    load: str
    """The load profile beside the measurement: ``idle``, ``cpu:2``, ``device``."""
    sizes: list[int]
    """Bytes per copy, per rank of pairs, ascending."""
    rows: list[int]
    row_nodes: list[Optional[int]]
    columns: list[int]
    column_nodes: list[Optional[int]]
    gbps: NDArray[np.float64]
    """Decimal GB/s, sizes × rows × columns, NaN = not measured: bytes ÷ time of one copy, of one
    direction where both are copied at once, bytes per rank ÷ time for pairs."""
    spread: NDArray[np.float64]
    """Median absolute deviation of the blocks' medians ÷ their median, corrected for their number;
    sizes × rows × columns, NaN with fewer than two blocks."""
    status: NDArray[np.uint8]
    """A :class:`Status` per cell, sizes × rows × columns."""
    predicted_gbps: Optional[NDArray[np.float32]]
    """Of a sampled sweep what its model says of the cells that it left out, decimal GB/s, sizes ×
    rows × columns, NaN where a cell was measured; ``None`` where all were to be measured."""
    predicted_error: Optional[NDArray[np.float32]]
    """Half-width of the 95 % interval of a visit of such a cell, as a share of ``predicted_gbps``."""

    @property
    def axes(self) -> tuple[str, str]:
        """What rows and columns are."""
        if self.sweep == "core_pair":
            return "rank0_cpu", "rank1_cpu"
        return "cpu", "device"

    def to_frame(self) -> pd.DataFrame:
        """One row per cell: load, size (bytes), the two ids, gbps, spread, status (a word) and, of a
        sampled sweep, predicted_gbps and predicted_error.

        ``frame.pivot(index="cpu", columns="device", values="gbps")`` is a matrix of one size.
        """
        pandas = _pandas()
        sizes, rows, columns = np.meshgrid(self.sizes, self.rows, self.columns, indexing="ij")
        row, column = self.axes
        words = [status.name.lower() for status in Status]
        cells = {
            "load": pandas.Categorical.from_codes(np.zeros(self.gbps.size, np.int8), [self.load]),
            "size": sizes.ravel(),
            row: rows.ravel(),
            column: columns.ravel(),
            "gbps": self.gbps.ravel(),
            "spread": self.spread.ravel(),
            "status": pandas.Categorical.from_codes(self.status.ravel().astype(np.int8), words),
        }
        if self.predicted_gbps is not None and self.predicted_error is not None:
            cells["predicted_gbps"] = self.predicted_gbps.ravel()
            cells["predicted_error"] = self.predicted_error.ravel()
        frame: pd.DataFrame = pandas.DataFrame(cells)
        return frame

    def __repr__(self) -> str:
        shape = " × ".join(str(count) for count in self.gbps.shape)
        row, column = self.axes
        measured = self.gbps[np.isfinite(self.gbps)]
        if measured.size:
            rates = f"median {np.median(measured):.4g} GB/s, {measured.size} of {self.gbps.size} cells"
        else:
            rates = "no cell"
        load = "" if self.load == "idle" else f", load {self.load}"
        return f"<{self.sweep}{load}: {shape} (size × {row} × {column}) measured, {rates}>"


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis:
    """What a result folder says."""

    verdict: str
    """``healthy``, ``findings`` or ``inconclusive``."""
    findings: list[dict[str, Any]]
    """Faults, artefacts and doubts, the most important first, as docs/results.md describes them."""
    document: dict[str, Any]
    """All of it, as ``cluster-health diagnose --json`` prints it."""
    text: str
    """The first page of report.md."""
    matrices: list[Matrix]
    """Everything that was measured, one per sweep, load and kind of memory."""
    complete: bool
    """False when the run was interrupted."""
    bad_lines: list[str]
    """Lines of the log that could not be used, with their numbers."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<diagnosis: {self.verdict}, {len(self.findings)} findings>"


@dataclass(frozen=True, eq=False, repr=False)
class _Result:
    matrix: Matrix
    """Under the plan's first load."""
    complete: bool
    """False when the sweep was stopped before its last point."""
    notes: list[str]
    """What a reader should know before trusting the numbers."""
    other_matrices: list[Matrix] = field(default_factory=list)
    """The same under the plan's other loads, and with other kinds of memory in a result folder."""
    diagnosis: Optional[Diagnosis] = None
    """What the folder says, of a recorded sweep (``out=``)."""

    @property
    def sizes(self) -> list[int]:
        """Bytes per copy, per rank of pairs, ascending."""
        return self.matrix.sizes

    @property
    def status(self) -> NDArray[np.uint8]:
        """A :class:`Status` per cell, in the shape of the rates."""
        return self.matrix.status

    @property
    def spread(self) -> NDArray[np.float64]:
        """Spread between blocks, see :attr:`Matrix.spread`, in the shape of the rates."""
        return self.matrix.spread

    @property
    def findings(self) -> Optional[list[dict[str, Any]]]:
        """Faults, artefacts and doubts of a recorded sweep (``out=``); ``None`` of any other: judging
        needs the times of single points."""
        return None if self.diagnosis is None else self.diagnosis.findings

    def to_frame(self) -> pd.DataFrame:
        """One row per cell, see :meth:`Matrix.to_frame`; all loads."""
        frames = [matrix.to_frame() for matrix in [self.matrix, *self.other_matrices]]
        if len(frames) == 1:
            return frames[0]
        pandas = _pandas()
        frame: pd.DataFrame = pandas.concat(
            [frame.assign(load=frame["load"].astype(str)) for frame in frames], ignore_index=True
        )
        return frame

    def __repr__(self) -> str:
        parts = [repr(self.matrix).strip("<>")]
        if self.other_matrices:
            parts.append(f"{len(self.other_matrices)} more matrices")
        if not self.complete:
            parts.append("interrupted")
        if self.diagnosis is not None:
            parts.append(self.diagnosis.verdict)
        return f"<{'; '.join(parts)}>"


class H2dResult(_Result):
    """Copies between host and device: CPU × device."""

    @property
    def gbps(self) -> NDArray[np.float64]:
        """Decimal GB/s, sizes × CPUs × devices, NaN = not measured."""
        return self.matrix.gbps

    @property
    def cpus(self) -> list[int]:
        """The CPUs of the rows."""
        return self.matrix.rows

    @property
    def devices(self) -> list[int]:
        """The devices of the columns."""
        return self.matrix.columns


class CorePairResult(_Result):
    """All-gathers of two ranks: rank-0 CPU × rank-1 CPU.

    For n = 2 ranks that contribute S bytes each and take t, the slower rank's time, with the bandwidths
    of NVIDIA's nccl-tests: ``per_rank_gbps`` = S ÷ t, ``alg_gbps`` = n·S ÷ t, ``bus_gbps`` = (n − 1)·S ÷ t,
    for two ranks the same as per rank. All are decimal GB/s, sizes × rank-0 CPUs × rank-1 CPUs, NaN = not
    measured.
    """

    @property
    def per_rank_gbps(self) -> NDArray[np.float64]:
        """Bytes per rank ÷ time; what files and pictures carry."""
        return self.matrix.gbps

    @property
    def alg_gbps(self) -> NDArray[np.float64]:
        """Algorithm bandwidth: bytes of both ranks ÷ time."""
        return 2.0 * self.matrix.gbps

    @property
    def bus_gbps(self) -> NDArray[np.float64]:
        """Bus bandwidth: bytes that a rank receives from the other ÷ time."""
        return self.matrix.gbps.copy()

    @property
    def rank0_cpus(self) -> list[int]:
        """The CPUs of rank 0, those of the rows."""
        return self.matrix.rows

    @property
    def rank1_cpus(self) -> list[int]:
        """The CPUs of rank 1, those of the columns."""
        return self.matrix.columns


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Runs of one plan against each other."""

    verdict: str
    """``no difference``, ``differences`` or ``inconclusive``."""
    document: dict[str, Any]
    """Ratios B ÷ A with intervals, classes and cells that changed, as ``compare --json`` prints them."""
    text: str
    """The same in words."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<comparison: {self.verdict}>"


@dataclass(frozen=True, eq=False, repr=False)
class Census:
    """Which CPUs can really be bound, and why not the others."""

    cpus: list[dict[str, Any]]
    """One record per present CPU, as in affinity.json."""
    summary: dict[str, Any]
    """Counts and reasons."""

    @property
    def bindable(self) -> list[int]:
        """The CPUs that can be bound."""
        return [cpu["cpu"] for cpu in self.cpus if cpu["bindable"]]

    def to_frame(self) -> pd.DataFrame:
        """One row per present CPU."""
        frame: pd.DataFrame = _pandas().DataFrame(self.cpus)
        return frame

    def __repr__(self) -> str:
        return f"<census: {len(self.bindable)} of {len(self.cpus)} CPUs can be bound>"
