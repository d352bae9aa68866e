"""Which model serves, and how it computes, as flags say it.

Must not know: pools, engines. Called by: real, rank_setup, the server.
"""

from __future__ import annotations

from dataclasses import dataclass

from refimpl.model.catalog import Model, open_model


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Which model serves, and how it computes: what ``open_model`` takes."""

    path: str
    arithmetic: str = "reference"
    dtype: str = "auto"
    device: str = "auto"

    def open(self, seed: int) -> Model:
        """Load it. Raises what ``open_model`` raises."""
        return open_model(
            self.path,
            arithmetic=self.arithmetic,
            dtype=self.dtype,
            device=self.device,
            seed=seed,
        )
