"""A whole training step of Qwen3-MoE with the layer, beside the same step of its peers.

    python benchmarks/step.py [--model qwen3-30b-a3b] [--layers 2] [--seq 16384] [--batch N]
                              [--steps 20] [--expert-parallel R] [--only NAME,...] [--rounds 2]
                              [--tokens FILE.npy] [--peers-path DIR] [--timeout 240] [--within 540]
                              [--out benchmarks/results/step.json] [--png docs/step.png]

All implementations train the same model on the same batches of real text, by tokens that a .npy
holds or else the bytes of Python's standard library, with the router's own choices: float32
parameters and AdamW, bf16 products, each layer computed again in the backward, cuDNN's or flash
attention, the mean loss over all positions, balancing by a selection bias. The mean of the steps
from --first on to the last is a step's time; each step is given to the devices before the one
before it is waited for.

    jax_megamoe          the layer, in bf16
    jax_megamoe_fp8      the layer, with precision="fp8_block"
    tokamax_ragged_dot   its experts exchanged for sorted rows and tokamax's grouped products; over
                         several ranks with all_gather and psum_scatter (_step_peers.py)
    lax_ragged_dot       the same with jax.lax.ragged_dot; by default where tokamax is not installed
    torch_grouped_mm     the same model in PyTorch alone (_step_torch.py): torch._grouped_mm,
                         torch.compile, fused AdamW, over several GPUs fully_shard (FSDP2) and
                         all_to_all_single; it begins with the parameters that JAX drew
    jax_reference        the package's reference in plain JAX, exact and not tuned

Each runs in a process of its own, one after the other, the next round in the reverse order. What
fails is a record with the text of its error, and the others go on.

Memory: 16 bytes a parameter for masters, gradients and both moments, and up to 8 more at the end of
a step, where sums of gradients and new parameters stand beside the old ones; all of it split over
the GPUs. Embedding and output matrix of qwen3-30b-a3b (a vocabulary of 151,936) are 622 million
parameters and a layer 623 million, 10.0 GB each by those 16 bytes; of qwen3-235b-a22b 1,245 and
2,488 million, 19.9 and 39.8 GB. So 2 layers of the first take 30 to 45 GB of one GPU, of the second
100 to 150, and one layer 60 to 90. On top come the matrices of a layer in bf16 and what it keeps
and makes, some 10 GB at 16,384 tokens a GPU, and 4 bytes a parameter in the folder for temporary
files, from which PyTorch begins.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the devices

import jax
import numpy as np
from _implementations import backend, use_peers
from _record import device, write
from _step_job import IMPLEMENTATIONS, TORCH, Job, Result, run
from _step_report import ALL_OURS, compared, draw, record, sentences, table
from _timing import Clock

from jax_megamoe.models.flops import peak_flops
from jax_megamoe.models.training import make_mesh
from jax_megamoe.models.training_config import TrainingConfig, from_dict, to_dict

ROOT = pathlib.Path(__file__).parents[1]
# With less time left no process is started; in later rounds so many times what it took before.
LEAST_SECONDS, SPARE = 60.0, 1.2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="qwen3-30b-a3b", help="or qwen3-235b-a22b, or a config.json's path")
    add("--layers", type=int, default=2, help="of the model (default: %(default)s)")
    add("--seq", type=int, default=16384, help="tokens of a sequence (default: %(default)s)")
    add("--batch", type=int, help="sequences of a step over all GPUs (default: one a GPU)")
    add("--steps", type=int, default=20, help="of a run (default: %(default)s)")
    add("--first", type=int, default=6, help="the first step that is timed (default: %(default)s)")
    add("--gpus", type=int, help="the first so many (default: all that JAX has)")
    add("--expert-parallel", type=int, help="GPUs that share the experts (default: all)")
    add("--loss-chunk", type=int, default=2048, help="positions whose logits are made at a time")
    add("--tokens", type=pathlib.Path, metavar="FILE.npy", help="integers [N] to train on")
    names = ", ".join(IMPLEMENTATIONS)
    add("--only", type=lambda text: text.split(","), metavar="NAME,...", help=f"of {names}")
    add("--rounds", type=int, default=2, help="of all in turn (default: %(default)s)")
    add("--timeout", type=float, default=240, help="seconds of a process (default: %(default)s)")
    add("--within", type=float, default=540, help="seconds of all processes (default: %(default)s)")
    add("--peer-rows", type=float, default=2.0, help="of a JAX peer's rank, over an even routing's")
    add("--peers-path", type=pathlib.Path, help="a directory of packages that only peers need")
    add("--out", type=pathlib.Path, help="write the figures to this JSON file")
    add("--png", type=pathlib.Path, help="draw losses and rates into this file")
    options = parser.parse_args(arguments)
    options.gpus = options.gpus or len(jax.devices())
    options.batch = options.batch or options.gpus
    options.expert_parallel = options.expert_parallel or options.gpus
    if unknown := sorted(set(options.only or ()) - set(IMPLEMENTATIONS)):
        parser.error(f"--only must be of {names}, but it has {', '.join(unknown)}")
    if not 1 < options.first <= options.steps:
        parser.error(f"--first must be 2 to --steps {options.steps}, but it is {options.first}")
    if not 1 <= options.gpus <= len(jax.devices()):
        parser.error(f"--gpus must be 1 to {len(jax.devices())}, but it is {options.gpus}")
    return options


def chosen(only: Sequence[str] | None) -> list[str]:
    """The implementations of a run, in their order; of the grouped products one, unless said."""
    if only:
        return [name for name in IMPLEMENTATIONS if name in only]
    slower = "lax" if importlib.util.find_spec("tokamax") else "tokamax"
    return [name for name in IMPLEMENTATIONS if name != f"{slower}_ragged_dot"]


def configuration(options: argparse.Namespace) -> TrainingConfig:
    """What all have in common.

    Raises:
      TypeError, ValueError: what `TrainingConfig` and `make_mesh` refuse.
    """
    on_gpu = jax.default_backend() == "gpu"
    config = from_dict(
        {
            "model": {"base": options.model, "num_hidden_layers": options.layers},
            "seq": options.seq,
            "batch": options.batch,
            "expert_parallel": options.expert_parallel,
            "backend": backend(),
            "attention": "cudnn" if on_gpu else "xla",
            "loss_chunk": options.loss_chunk,
            "steps": options.steps,
            "warmup": min(5, options.steps),
        }
    )
    make_mesh(config, jax.devices()[: options.gpus])
    return config


def make_batches(tokens: pathlib.Path | None, config: TrainingConfig) -> np.ndarray:
    """int32 [steps, batch, seq + 1] of a file, or of the bytes of Python's standard library.

    Raises:
      OSError, ValueError: a file that cannot be read or holds something else.
      lm.data.DataError: too little text.
    """
    sys.path.append(str(ROOT / "examples"))
    data = importlib.import_module("qwen3.data")
    sizes = config.batch, config.seq
    if tokens is None:
        texts, source = data.documents(None, None, "")
        most = config.steps * config.batch * config.seq + 1
        text = data.load_text(texts, source, data.load_tokenizer(data.BYTES), most, None)
    else:
        text = data.Text(np.load(tokens, mmap_mode="r"), 0, str(tokens))
        if text.tokens.ndim != 1 or text.tokens.dtype.kind not in "iu":
            was = f"{text.tokens.dtype} {text.tokens.shape}"
            raise ValueError(f"--tokens {tokens} must hold integers [N], but they are {was}")
    steps = range(1, config.steps + 1)
    batches = np.stack([data.rows_of_step(text, config.seed, step, *sizes) for step in steps])
    if batches.min() < 0 or batches.max() >= config.model.vocab_size:
        may_be = f"0..{config.model.vocab_size - 1}"
        was = f"{batches.min()}..{batches.max()}"
        raise ValueError(f"--tokens {tokens} must hold tokens in {may_be}, but they are {was}")
    return batches


class Session:
    """One run of the program: what its processes are told, and what they have found so far."""

    def __init__(self, options: argparse.Namespace, config: TrainingConfig) -> None:
        self.options = options
        self.config = config
        self.names = chosen(options.only)
        self.rounds: dict[str, list[Result]] = {name: [] for name in self.names}
        self.needed = dict.fromkeys(self.names, LEAST_SECONDS)
        self.has_parameters = False
        on_gpu = jax.default_backend() == "gpu"
        self.clock = Clock.of_gpus(options.gpus) if on_gpu else None
        self.end = time.monotonic() + options.within

    def run_all(self, folder: pathlib.Path) -> None:
        """All rounds, as far as time is left; a round that does not run is no failure."""
        np.save(folder / "batches.npy", make_batches(self.options.tokens, self.config))
        for turn in range(self.options.rounds):
            for name in self.names[:: -1 if turn % 2 else 1]:
                found = self.rounds[name]
                if any("error" in result for result in found):
                    continue
                result = self.run_one(name, folder)
                if result is None and not found:
                    result = {"error": f"no time was left within --within {self.options.within} s"}
                if result is not None:
                    found.append(result)
                    self.keep()

    def run_one(self, name: str, folder: pathlib.Path) -> Result | None:
        """None: no time is left."""
        left = min(self.end - time.monotonic(), self.options.timeout)
        if left < min(self.needed[name], self.options.timeout):
            return None
        job = Job(
            impl=name,
            config=to_dict(self.config_of(name)),
            batches=str(folder / "batches.npy"),
            num_devices=self.options.gpus,
            parameters=self.parameters_of(name, folder),
            first_measured=self.options.first,
            peer_rows=self.options.peer_rows,
            peers_path=str(self.options.peers_path) if self.options.peers_path else None,
        )
        start = time.monotonic()
        result = run(IMPLEMENTATIONS[name][0], job, folder, left)
        seconds = time.monotonic() - start
        self.needed[name] = SPARE * seconds
        if "error" not in result:
            drawn_by_jax = name != TORCH or job.parameters is not None
            result["start"] = f"drawn by {'JAX' if drawn_by_jax else 'PyTorch'}"
            self.has_parameters |= name != TORCH and job.parameters is not None
            if self.clock:
                begin, end = result["measured"]
                result["clock_mhz"] = self.clock.median_mhz(begin, end, self.options.gpus)
        outcome = result.get("error") or f"{np.mean(result['step_seconds']):.4f} s a step"
        print(f"{name}: {outcome}, {seconds:.0f} s in all", file=sys.stderr, flush=True)
        return result

    def parameters_of(self, name: str, folder: pathlib.Path) -> str | None:
        """The folder that a run writes or reads; the first run in JAX writes, for PyTorch's."""
        writes = name != TORCH and TORCH in self.names and not self.has_parameters
        reads = name == TORCH and self.has_parameters
        if not (writes or reads):
            return None
        path = folder / "parameters"
        path.mkdir(exist_ok=True)
        return str(path)

    def config_of(self, name: str) -> TrainingConfig:
        return dataclasses.replace(self.config, **IMPLEMENTATIONS[name][1])

    def records(self) -> list[dict[str, Any]]:
        peak = peak_flops(device())
        return [
            {"impl": name, "model": self.options.model}
            | record(self.config_of(name), self.options.gpus, peak, found)
            for name, found in self.rounds.items()
            if found
        ]

    def keep(self) -> None:
        """After every process: what is interrupted leaves what it has."""
        if self.options.out:
            records = self.records()
            write(
                self.options.out,
                [*records, {"comparisons": compared(records)}],
                self.options.gpus,
            )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    use_peers(options.peers_path)
    try:
        config = configuration(options)
    except (OSError, TypeError, ValueError) as error:
        raise SystemExit(f"step.py: {error}") from error
    session = Session(options, config)
    with tempfile.TemporaryDirectory() as folder:
        session.run_all(pathlib.Path(folder))
    records = session.records()
    comparisons = compared(records)
    print("\n".join([table(records), *sentences(comparisons)]))
    if options.png:
        sizes = f"{options.layers} layers, {config.batch} x {config.seq} tokens"
        draw(options.png, records, f"{options.model}, {sizes}, {options.gpus} x {device()}")
    failed = any(r["impl"] in ALL_OURS and "error" in r for r in records)
    apart = any(not c["agree"] for c in comparisons if c["of_same_parameters"])
    return int(failed or apart)


if __name__ == "__main__":
    sys.exit(main())
