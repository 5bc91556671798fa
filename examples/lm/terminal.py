"""What the training scripts share at the terminal: refusals, Ctrl-C, simulated devices."""

import signal

import jax

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


class UsageError(Exception):
    """The arguments or the run cannot go on; the message is for the person at the terminal."""


def simulate_devices(count: int | None) -> None:
    """So many CPU devices in place of those that there are; None: those.

    Raises:
      UsageError: fewer than one.
    """
    if count is None:
        return
    if count < 1:
        raise UsageError(f"--devices must be at least 1, but it is {count}.")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


class StopRequest:
    """Ctrl-C as a flag, read between steps; a second one interrupts at once."""

    def __enter__(self) -> "StopRequest":
        self.asked = False
        self._previous = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _ask(self, *_: object) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
