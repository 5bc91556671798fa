"""jax_megamoe over ranks with a process a GPU, under jax.distributed; asked by _workers.py."""

import pathlib
import socket
import time

import jax
from _ranks import expert_mesh, jax_megamoe, on_ranks, quantized_on
from _shapes import Shape, inputs
from _timing import Run

RENDEZVOUS_SECONDS = 60.0


def make(
    rank: int,
    num_ranks: int,
    rendezvous: str,
    pass_name: str,
    shape: Shape,
    save: str,
    sums: str,
    precision: str,
) -> Run:
    """A pass of rank `rank`'s share of the layer, on the inputs of the process with all GPUs."""
    if not jax.distributed.is_initialized():
        connect(rank, num_ranks, pathlib.Path(rendezvous))
    mesh = expert_mesh(num_ranks)
    arrays = on_ranks(mesh, inputs(shape, "bf16"))
    quantized = quantized_on(mesh, arrays) if precision == "fp8_block" else None
    return jax_megamoe(mesh, pass_name, save, arrays, sums, quantized)


def connect(rank: int, num_ranks: int, rendezvous: pathlib.Path) -> None:
    """Rank 0 writes the port at which the others find it."""
    if rank == 0:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        written = rendezvous.with_suffix(".written")
        written.write_text(str(port))
        written.rename(rendezvous)
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while not rendezvous.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 was not there within {RENDEZVOUS_SECONDS:.0f} s")
        time.sleep(0.05)
    jax.distributed.initialize(
        f"localhost:{rendezvous.read_text()}", num_ranks, rank, local_device_ids=[rank]
    )
