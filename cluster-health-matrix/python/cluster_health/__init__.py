"""Measured matrices of CPU core × accelerator bandwidth as numpy arrays.

=================  =====================================================================
:func:`h2d`        copies between host and device: CPU × device
:func:`core_pair`  all-gathers of two ranks: rank-0 CPU × rank-1 CPU
:func:`diagnose`   what a result folder says
:func:`compare`    runs of one plan against each other
:func:`census`     which CPUs can be bound
=================  =====================================================================

Everything takes its arguments by keyword, named as the options of the command line, and ``None`` is their
default there. A sweep runs on the calling thread, which is bound to one CPU after another and gets its old
mask back; other threads of the interpreter run meanwhile. Ctrl-C stops it with ``KeyboardInterrupt``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, Optional, Protocol, Union

import numpy as np

from . import _native
from ._errors import (
    BackendError,
    BusyError,
    Error,
    FormatError,
    InvalidError,
    RankError,
    TimeoutError,
    UnavailableError,
)
from ._native import CancelToken
from ._results import (
    Census,
    Comparison,
    CorePairResult,
    Diagnosis,
    H2dResult,
    Matrix,
    Status,
)

__all__ = [
    "BackendError",
    "BusyError",
    "CancelToken",
    "Census",
    "Comparison",
    "CorePairResult",
    "Diagnosis",
    "Error",
    "FormatError",
    "H2dResult",
    "InvalidError",
    "Matrix",
    "RankError",
    "Status",
    "TimeoutError",
    "UnavailableError",
    "census",
    "compare",
    "core_pair",
    "diagnose",
    "h2d",
]

Path = Union[str, "os.PathLike[str]"]
Ids = Union[str, int, Sequence[int], "np.ndarray[Any, np.dtype[np.integer[Any]]]"]
"""``"0-3,8"``, ``[0, 1]``, ``range(4)`` or one number."""
Sizes = Union[str, int, Sequence[Union[str, int]]]
"""``"16MiB,64MiB"``, ``["4KiB", 65536]`` or bytes."""
Share = Union[str, float]
"""``0.03`` or ``"3%"``."""
Seconds = Union[str, float]
"""``"500ms"``, ``"30s"``, ``"2m"`` or seconds."""


class Bar(Protocol):
    """What :class:`tqdm.tqdm` has."""

    total: Any
    n: Any

    def update(self, n: int) -> Any: ...
    def close(self) -> Any: ...


Progress = Union[Callable[[int, int], object], type[Bar]]
"""A function of points done and points known to be needed, or the class ``tqdm`` itself."""


def h2d(
    *,
    cpus: Optional[Ids] = None,
    devices: Optional[Ids] = None,
    sizes: Optional[Sizes] = None,
    direction: Optional[str] = None,
    concurrent: Optional[bool] = None,
    iters: Optional[int] = None,
    repeats: Optional[int] = None,
    warmup: Optional[int] = None,
    seed: Optional[int] = None,
    sample: Optional[bool] = None,
    budget: Optional[Seconds] = None,
    target: Optional[Share] = None,
    ci: Optional[Share] = None,
    min_effect: Optional[Share] = None,
    order: Optional[str] = None,
    load: Union[str, Sequence[str], None] = None,
    arena: Optional[str] = None,
    check: Optional[str] = None,
    timeout: Optional[Seconds] = None,
    expect: Union[str, float, None] = None,
    backend: str = "auto",
    scenario: Optional[Path] = None,
    out: Optional[Path] = None,
    resume: bool = False,
    force: bool = False,
    progress: Optional[Progress] = None,
    cancel: Optional[CancelToken] = None,
) -> H2dResult:
    """Measures copies between host and device: every CPU × every device × every size.

    :param cpus: rows, in this order; default: all that can be bound
    :param devices: columns by physical id, in this order; default: all
    :param sizes: bytes per copy; default 16, 64 and 256 MiB as far as they fit into memory
    :param direction: ``h2d``, ``d2h`` or ``bidirectional``
    :param concurrent: all other devices copy, too, while one is measured
    :param iters: timed copies per visit, 3
    :param repeats: blocks, 3: every cell is visited once in each, in a fresh order
    :param warmup: exactly so many discarded copies per visit; default: until settled
    :param seed: of all orders, 1
    :param sample: a part of the cells is measured, the others are predicted, within ``budget`` of machine
        time (30 s) or until nine of ten rows and columns are known to ± ``target``; both imply it
    :param ci: adds blocks until each cell's 95 % interval has this relative half-width
    :param min_effect: smallest difference that counts as a fault, 3 %
    :param order: ``blocks`` or ``sequential``
    :param load: profiles under which every cell is measured: ``idle``, ``cpu:2``, ``device``
    :param arena: host memory per NUMA ``node`` or per ``core``
    :param check: data check: ``tags``, ``full`` or ``off``
    :param timeout: bound of every wait, 30 s
    :param expect: rate that the link should have: ``"58.5GB/s"``, a number is decimal GB/s
    :param backend: ``auto``, ``host`` (one device per NUMA memory node), ``ascend`` or ``synthetic``
    :param scenario: file or text (TOML) of a synthetic machine
    :param out: records the sweep into this result folder and judges it; must be absent or empty unless
        ``resume`` or ``force``
    :param resume: goes on with the interrupted run of the same plan in ``out``
    :param force: replaces what is in ``out``
    :param progress: called between visits, at most every 50 ms, and at the end
    :param cancel: stops the sweep from another thread; the result then has ``complete`` = False

    :raises InvalidError: an argument cannot be used
    :raises Error: nothing could be measured, or ``out`` cannot be written
    :raises KeyboardInterrupt: after the sweep has stopped; what was recorded is in ``out``

    The rates are ``result.gbps``: sizes × CPUs × devices, decimal GB/s, NaN = not measured. A cell that
    cannot be measured is a status, not an error.

    It measures in the process that calls it: under a launcher call it on one rank, or give each rank its
    own ``devices`` and ``cpus`` where they are to be measured together.
    """
    measured = _measure("h2d", locals())
    assert measured is not None, "the sweep of copies has no other ranks"
    return H2dResult(**measured)


def core_pair(
    *,
    rank0_cpus: Optional[Ids] = None,
    rank1_cpus: Optional[Ids] = None,
    device_pair: Union[str, Sequence[int], None] = None,
    sizes: Optional[Sizes] = None,
    iters: Optional[int] = None,
    repeats: Optional[int] = None,
    warmup: Optional[int] = None,
    seed: Optional[int] = None,
    sample: Optional[bool] = None,
    budget: Optional[Seconds] = None,
    target: Optional[Share] = None,
    ci: Optional[Share] = None,
    min_effect: Optional[Share] = None,
    order: Optional[str] = None,
    load: Union[str, Sequence[str], None] = None,
    check: Optional[str] = None,
    timeout: Optional[Seconds] = None,
    expect: Union[str, float, None] = None,
    backend: str = "auto",
    scenario: Optional[Path] = None,
    ranks: str = "auto",
    out: Optional[Path] = None,
    resume: bool = False,
    force: bool = False,
    progress: Optional[Progress] = None,
    cancel: Optional[CancelToken] = None,
) -> Optional[CorePairResult]:
    """Measures an all-gather of two ranks: every CPU of rank 0 × every CPU of rank 1 × every size.

    Inside a launcher (``torchrun --nproc_per_node 2``, ``mpirun -n 2``, ``srun -n 2``) this process is one
    of the ranks: both call this with the same arguments, **rank 0 gets the result, rank 1 gets None**.
    Without a launcher the host backend's other rank is a thread of this process; the other backends raise
    :class:`UnavailableError`. A synthetic machine has both ranks.

    :param rank0_cpus: rows, in this order; default: all that can be bound
    :param rank1_cpus: columns, in this order; default: all that can be bound
    :param device_pair: devices of rank 0 and rank 1 by physical id; default: the first two
    :param sizes: bytes per rank; default 8 MiB
    :param ranks: ``auto``, ``env`` (insists on a launcher) or ``local`` (ignores it)
    :param budget: of machine time for a sampled sweep, 8 s

    The other arguments and what is raised are those of :func:`h2d`; Ctrl-C on either rank ends both.
    :class:`CorePairResult` says which of the three bandwidths is which.
    """
    measured = _measure("core_pair", locals())
    return None if measured is None else CorePairResult(**measured)


def diagnose(folder: Path, *, expect: Union[str, float, None] = None) -> Diagnosis:
    """What a result folder says: faults, artefacts, doubts and what was not tested.

    :param expect: rate that the link should have: ``"58.5GB/s"``, a number is decimal GB/s

    :raises Error: its manifest or log cannot be read
    """
    rate = f"{expect}GB/s" if isinstance(expect, (int, float)) else expect
    found = _native.diagnose(os.fspath(folder), rate)
    return _diagnosis(found, [Matrix(**fields) for fields in found["matrices"]])


def compare(a: Path, b: Path, *more: Path, min_effect: float = 0.03, force: bool = False) -> Comparison:
    """Result folders of the same plan: ``b`` against ``a``, or three and more as the map of a pod.

    :param min_effect: differences below this share of the rate do not count
    :param force: compares although plans or machines differ

    :raises InvalidError: plans or machines differ; the message says in what
    """
    runs = [os.fspath(run) for run in (a, b, *more)]
    found = _native.compare(runs, min_effect, force)
    return Comparison(
        verdict=found["verdict"], document=json.loads(found["document"]), text=found["text"]
    )


def census(*, backend: str = "host", scenario: Optional[Path] = None) -> Census:
    """Which CPUs can really be bound, and why not where they cannot: each is tried from a thread of its
    own."""
    found = json.loads(_native.census(_on(backend, scenario)))
    return Census(cpus=found["cpus"], summary=found["summary"])


_SETTING = ("backend", "scenario", "ranks", "out", "resume", "force", "progress", "cancel")


def _measure(sweep: str, arguments: dict[str, Any]) -> Optional[dict[str, Any]]:
    """The fields of a result, from the arguments of the function that measures it."""
    options = {
        name: value
        for name, value in arguments.items()
        if name not in _SETTING and value is not None
    }
    plan = json.dumps({"sweep": sweep, **options}, default=_plain)
    out = arguments["out"]
    setting: _native._Setting = {
        "out": None if out is None else os.fspath(out),
        "resume": arguments["resume"],
        "force": arguments["force"],
        "ranks": arguments.get("ranks", "auto"),
    }
    on = _on(arguments["backend"], arguments["scenario"])
    progress, close = _progress(arguments["progress"])
    try:
        measured = _native.measure(plan, on, setting, progress, arguments["cancel"])
    finally:
        close()
    if measured is None:
        return None
    matrices = [Matrix(**fields) for fields in measured["matrices"]]
    return {
        "matrix": matrices[0],
        "other_matrices": matrices[1:],
        "complete": measured["complete"],
        "notes": measured["notes"],
        "diagnosis": _diagnosis(measured, matrices) if "diagnosis" in measured else None,
    }


def _on(backend: str, scenario: Optional[Path]) -> _native._On:
    return {"backend": backend, "scenario": None if scenario is None else os.fspath(scenario)}


def _plain(value: Any) -> Any:
    """What JSON lacks: numpy's numbers and arrays, ranges and other sequences."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Sequence):
        return list(value)
    raise InvalidError(f"{value!r} is no number, text or list", kind="invalid")


def _diagnosis(found: _native._Recorded, matrices: list[Matrix]) -> Diagnosis:
    document = json.loads(found["diagnosis"])
    return Diagnosis(
        verdict=document["verdict"],
        findings=document["findings"],
        document=document,
        text=found["text"],
        matrices=matrices,
        complete=found["complete"],
        bad_lines=found["bad_lines"],
    )


def _progress(
    wanted: Optional[Progress],
) -> tuple[Optional[Callable[[int, int], object]], Callable[[], object]]:
    """What to call between visits, and at the end."""
    if not (wanted is None or callable(wanted)):
        message = f"progress: {wanted!r} is neither a function of done and total nor the class tqdm"
        raise InvalidError(message, kind="invalid")
    if not (isinstance(wanted, type) and hasattr(wanted, "update")):
        return wanted, lambda: None
    bar: Bar = wanted(unit=" points")

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return show, bar.close
