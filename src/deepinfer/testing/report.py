"""What a contract check found."""

from __future__ import annotations

import attrs

__all__ = ["CaseResult", "OpReport"]


@attrs.frozen
class CaseResult:
    """One passed case: the largest relative error of any row (0 where bits were compared)."""

    name: str
    error: float


@attrs.frozen
class OpReport:
    """A passed check of one implementation."""

    kind: str
    implementation: str
    device: str
    dtype: str
    invariant: bool
    cases: tuple[CaseResult, ...]

    @property
    def worst(self) -> CaseResult:
        return max(self.cases, key=lambda case: case.error)

    def __str__(self) -> str:
        mode = ", invariant" if self.invariant else ""
        return (
            f"{self.kind} {self.implementation} ({self.device}, {self.dtype}{mode}): {len(self.cases)} cases, "
            f"largest relative error {self.worst.error:.1e} in {self.worst.name!r}"
        )
