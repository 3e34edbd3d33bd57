import os
from collections.abc import Callable, Sequence
from typing import Optional, TypedDict, final

import numpy as np
from numpy.typing import NDArray

__all__ = ["CancelToken", "census", "compare", "diagnose", "measure"]

class _On(TypedDict):
    backend: str
    scenario: Optional[str]

class _Setting(TypedDict):
    out: Optional[str]
    resume: bool
    force: bool
    ranks: str

class _Matrix(TypedDict):
    sweep: str
    load: str
    sizes: list[int]
    rows: list[int]
    row_nodes: list[Optional[int]]
    columns: list[int]
    column_nodes: list[Optional[int]]
    gbps: NDArray[np.float64]
    spread: NDArray[np.float64]
    status: NDArray[np.uint8]
    predicted_gbps: Optional[NDArray[np.float32]]
    predicted_error: Optional[NDArray[np.float32]]

class _Measured(TypedDict):
    matrices: list[_Matrix]
    complete: bool
    notes: list[str]

class _Recorded(_Measured, total=False):
    diagnosis: str
    text: str
    bad_lines: list[str]

class _Compared(TypedDict):
    verdict: str
    text: str
    document: str

@final
class CancelToken:
    """Stops sweeps from another thread: they end before their next point and return what they have."""

    def __new__(cls) -> CancelToken: ...
    def cancel(self) -> None:
        """Asks for the end; may be called from any thread and more than once."""
    @property
    def cancelled(self) -> bool:
        """True after `cancel()`."""

def measure(
    plan: str,
    on: _On,
    setting: _Setting,
    progress: Optional[Callable[[int, int], object]],
    cancel: Optional[CancelToken],
) -> Optional[_Recorded]: ...
def diagnose(folder: str, expect: Optional[str]) -> _Recorded: ...
def compare(runs: Sequence[str], min_effect: float, force: bool) -> _Compared: ...
def census(on: _On) -> str: ...
