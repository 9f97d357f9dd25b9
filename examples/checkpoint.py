"""What a run remembers, and how it is written to disk and taken up again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from options import UsageError


@dataclasses.dataclass
class History:
    """What was seen so far, in plain numbers.

    Attributes:
      loss: cross entropy of each step in nats a byte.
      heldout: pairs (steps done, held-out loss).
      load: of each step, picks of each expert, [layers][experts].
      dropped: of each step, picks that found no room, all layers together.
      seconds: duration of each step, but for those that had to compile.
    """

    loss: list[float] = dataclasses.field(default_factory=list)
    heldout: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    load: list[list[list[int]]] = dataclasses.field(default_factory=list)
    dropped: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def steps(self) -> int:
        return len(self.loss)

    def append(self, metrics: dict[str, Any], seconds: float | None) -> None:
        """Take in what a step of `make_train_step` returned."""
        self.loss.append(float(metrics["loss"]))
        self.load.append(metrics["load"].astype(int).tolist())
        self.dropped.append(int(metrics["dropped"].sum()))
        if seconds is not None:
            self.seconds.append(seconds)

    def latest(self) -> dict[str, str]:
        """The newest losses, for the progress bar."""
        heldout = {"held_out": f"{self.heldout[-1][1]:.3f}"} if self.heldout else {}
        return {"loss": f"{self.loss[-1]:.3f}"} | heldout


class Checkpoints:
    """Checkpoints of one run in one folder; the newest two are kept.

    Args:
      folder: made where it is missing.
      settings: what decides the course of the run; a checkpoint is taken up by a run of equal settings only.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self.folder = folder
        self._settings = settings
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """Steps done in the newest checkpoint; None if there is none."""
        return self._manager.latest_step()

    def save(self, model: nnx.Module, optimizer: nnx.Optimizer, history: History) -> None:
        """Write a checkpoint of the step that history ends with, unless it is there already."""
        if self.latest == history.steps:
            return
        arrays = nnx.to_pure_dict(nnx.state((model, optimizer)))
        record = {"settings": self._settings, "history": dataclasses.asdict(history)}
        self._manager.save(
            history.steps,
            args=ocp.args.Composite(state=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(record)),
        )

    def restore(self, model: nnx.Module, optimizer: nnx.Optimizer) -> History:
        """Fill model and optimiser from the newest checkpoint, as they lie on the mesh now.

        Raises:
          UsageError: the run that wrote it had other settings.
        """
        record = self._read(record=ocp.args.JsonRestore()).record
        for name, wanted in self._settings.items():
            if (found := record["settings"].get(name)) != wanted:
                raise UsageError(
                    f"--resume: expected the settings of the run in {self.folder}, where {name} is {found}, "
                    f"got {wanted}; pass the same, or start anew in another --checkpoint folder"
                )
        state = nnx.state((model, optimizer))
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            nnx.to_pure_dict(state),
        )
        nnx.replace_by_pure_dict(state, self._read(state=ocp.args.StandardRestore(like)).state)
        nnx.update((model, optimizer), state)
        return History(**record["history"])

    def close(self) -> None:
        self._manager.close()

    def _read(self, **items: Any) -> Any:
        return self._manager.restore(self.latest, args=ocp.args.Composite(**items))
