"""Checkpoints of a run with Orbax, from which it goes on as if it had never stopped.

What a step depends on is saved: parameters and optimizer state; the number of the step, which with
the seed says what text it sees; and the record so far. Arrays are saved whole, so a run may go on
with other devices; the bits are those of an uninterrupted run where the devices are as many as
before.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

KEPT = 2

Settings = dict[str, Any]


class CheckpointError(Exception):
    """The folder does not fit the run; the message is for the person at the terminal."""


class Checkpoints:
    """The checkpoints of one run in a folder: one every so many steps, the last KEPT of them.

    Args:
      folder: made if it is not there.
      every: steps between two checkpoints.
      settings: JSON values that a run must share with what it goes on from.
      resume: whether the folder may hold checkpoints to go on from.
      in_background: a save returns when the arrays are on the host, and is written meanwhile.

    Raises:
      CheckpointError: the folder holds checkpoints and `resume` is False, or of a run with other
        settings, or what is no checkpoint of a run, or cannot be made.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        every: int,
        settings: Settings,
        resume: bool,
        in_background: bool = False,
    ) -> None:
        self._folder, self._settings, self._every = folder, settings, every
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"--checkpoint {folder} is no folder: {error}.") from error
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, enable_async_checkpointing=in_background
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        self.latest = self._manager.latest_step()
        if self.latest is not None and not resume:
            raise CheckpointError(
                f"--checkpoint {folder} holds a run up to step {self.latest}; add --resume to go on"
                " with it, or give another folder."
            )
        try:
            self._rows = [] if self.latest is None else self._rows_of(self.latest)
        except CheckpointError:
            self._manager.close()
            raise

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def is_time(self, step: int) -> bool:
        return step % self._every == 0

    def save(
        self,
        step: int,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        rows: Sequence[Sequence[Any]],
        is_last: bool,
    ) -> None:
        """Saves the state after `step` if it is time, or the last step of this process.

        rows: the record up to it, of JSON values.
        """
        if not (is_last or self.is_time(step)):
            return
        record = {"settings": self._settings, "rows": [list(row) for row in rows]}
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(nnx.state((model, optimizer))),
            record=ocp.args.JsonSave(record),
        )
        self._manager.save(step, args=arguments, force=True)

    def restore(self, model: nnx.Module, optimizer: nnx.Optimizer) -> list[list[Any]]:
        """Puts the latest state into `model` and `optimizer`, laid out as they are.

        Returns the rows up to it; none where there is no checkpoint. Raises CheckpointError where
        it lacks the state.
        """
        if self.latest is None:
            return []
        state = nnx.state((model, optimizer))
        target = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
        )
        restored = self._read(self.latest, "state", ocp.args.StandardRestore(target))
        nnx.update((model, optimizer), restored)
        return self._rows

    def _rows_of(self, step: int) -> list[list[Any]]:
        record = self._read(step, "record", ocp.args.JsonRestore())
        for name, value in self._settings.items():
            if (was := record["settings"].get(name)) != value:
                raise CheckpointError(
                    f"the run to resume had {name} = {was!r}, but this one has {value!r}."
                )
        return record["rows"]

    def _read(self, step: int, part: str, how: Any) -> Any:
        """A part of what was saved behind a step."""
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{part: how}))[part]
        except (KeyError, OSError, ValueError) as error:
            raise CheckpointError(
                f"--checkpoint {self._folder} has no {part} of a run in its step {step} ({error});"
                " remove that step, or give another folder."
            ) from error
