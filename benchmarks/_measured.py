"""What the layer benchmark measures on one GPU, and the records that it makes of it."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from _implementations import IMPLEMENTATIONS, device_copy, jax_megamoe, matmul
from _report import ALL_OURS, BY_NAME, DTYPES, FROZEN, OURS, QUANTIZATION, Named
from _shapes import DTYPES as WEIGHT_DTYPES
from _shapes import SEED, Shape, bound_ms, inputs
from _timing import Clock, Figures, Method, Run, Timed, caught, measure

from jax_megamoe.config import SAVES

MATMUL_SIZE = 8192
COPY_BYTES = 2**30
WEIGHTS = tuple(WEIGHT_DTYPES)
Record = dict[str, Any]
Make = Callable[[], Timed]


class Variant(NamedTuple):
    """One way to run an implementation, its experts over `ep` GPUs.

    sums: the dtype of the partial sums that ranks of jax_megamoe send each other.
    """

    impl: str
    save: str = "none"
    weights_dtype: str = "bf16"
    ep: int = 1
    process_model: str = "single_process"
    sums: str = "float32"

    def __str__(self) -> str:
        text = f"{self.impl}, save {self.save}, {self.weights_dtype} weights"
        if self.ep == 1:
            return text
        return f"{text}, EP{self.ep}, {self.process_model}, {self.sums} sums"


def variants(
    shape: Shape,
    pass_name: str,
    *,
    only: Sequence[str] = (),
    saves: Sequence[str] = SAVES,
    weights: Sequence[str] = WEIGHTS,
) -> list[Variant]:
    """Of jax_megamoe all that were asked for, of the shape's peers those that there are.

    A forward without a gradient keeps nothing: there `save` is "none" for all, and experts that
    are not trained make no difference. What is in `BY_NAME` is measured when `only` names it, the
    quantisation of weights beside forwards.
    """
    found = []
    by_default = [OURS, *(peer for peer in shape.peers if peer not in BY_NAME)]
    for name in (*ALL_OURS, *shape.peers):
        if name not in (only or by_default):
            continue
        if name == (FROZEN if pass_name == "forward" else QUANTIZATION):
            continue
        ours = name in ALL_OURS
        kept = IMPLEMENTATIONS[name].saves
        kept = [save for save in kept if save in saves] if ours else kept
        for dtype in weights if ours else {"bf16"} & set(weights):
            of_pass = ["none"] if pass_name == "forward" else kept
            found += [Variant(name, save, dtype) for save in of_pass]
    return found


def record(
    variant: Variant,
    pass_name: str,
    shape: Shape,
    result: Figures | str,
    matmul_tflops: float,
) -> Record:
    """One line of a results file; `result` is the text of an error where there are no figures.

    Rates are those of one GPU, and so are the tokens.
    """
    described: Record = {
        "impl": variant.impl,
        "pass": pass_name,
        "dtype": DTYPES.get(variant.impl, "bf16"),
        "ep": variant.ep,
        "tokens": shape.T,
        "hidden": shape.H,
        "intermediate": shape.I,
        "experts": shape.E,
        "top_k": shape.K,
        "routing": shape.routing,
        "save": variant.save,
        "weights_dtype": variant.weights_dtype,
        "process_model": variant.process_model,
        "sums_dtype": variant.sums if variant.impl in ALL_OURS and variant.ep > 1 else None,
        "seed": SEED,
    }
    if isinstance(result, str):
        return described | {"error": result}
    measured = {
        "ms": round(result.ms, 4),
        "ms_spread": round(result.ms_spread, 4),
        "clock_mhz": result.clock_mhz,
    }
    if variant.impl == QUANTIZATION:
        return described | {"pass": "quantization"} | measured
    flops = shape.useful_flops(pass_name, trainable=variant.impl != FROZEN)
    tflops = flops / result.ms * 1e-9
    return (
        described
        | measured
        | {
            "tflops": round(tflops, 1),
            "matmul_tflops": round(matmul_tflops, 1),
            "fraction": round(tflops / matmul_tflops, 4),
        }
    )


def matmul_rate(figures: dict[str, Figures], size: int) -> float:
    """TFLOP/s of the run named matmul, without which nothing can be said of the others."""
    if "matmul" not in figures:
        raise RuntimeError("the matmul failed: there is nothing to compare with")
    return 2 * size**3 / figures["matmul"].ms * 1e-9


def run_beside_peers(
    shape: Shape,
    pass_name: str,
    chosen: Sequence[Variant],
    method: Method,
    clock: Clock | None,
    matmul_size: int = MATMUL_SIZE,
) -> list[Named]:
    """The records of the chosen variants, all measured in the same rounds."""
    arrays = {dtype: inputs(shape, dtype) for dtype in sorted({v.weights_dtype for v in chosen})}
    makes: dict[Variant, Make] = {}
    for variant in chosen:
        make = IMPLEMENTATIONS[variant.impl].make
        makes[variant] = functools.partial(
            make, pass_name, variant.save, arrays[variant.weights_dtype]
        )
    title = f"{shape.name} {pass_name}"
    results, rate = measure_beside(title, makes, matmul(matmul_size), matmul_size, method, clock)
    return [(shape.name, record(v, pass_name, shape, results[v], rate)) for v in chosen]


def measure_beside(
    title: str,
    makes: Mapping[Variant, Make],
    product: Timed,
    matmul_size: int,
    method: Method,
    clock: Clock | None,
) -> tuple[dict[Variant, Figures | str], float]:
    """Makes what is to be measured, in this order, and measures all in the same rounds.

    Returns:
      The figures or the error of each variant, and the TFLOP/s of `product`.
    """
    runs: dict[str, Timed] = {"matmul": product}
    errors: dict[str, str] = {}
    for variant, make in makes.items():
        with caught(str(variant), errors):
            start = time.perf_counter()
            run = make()
            run.seconds(1)
            runs[str(variant)] = run
            seconds = time.perf_counter() - start
            print(f"{title}, {variant}: first call after {seconds:.1f} s", flush=True)
    figures, late_errors = measure(runs, method, clock)
    results = figures | errors | late_errors
    return {v: results[str(v)] for v in makes}, matmul_rate(figures, matmul_size)


def forward_of(shape: Shape) -> Run:
    return jax_megamoe("forward", "none", inputs(shape, "bf16"))


def run_against_bound(
    shapes: Sequence[Shape],
    method: Method,
    clock: Clock | None,
    matmul_size: int = MATMUL_SIZE,
    copy_bytes: int = COPY_BYTES,
    *,
    pass_name: str = "forward",
    make: Callable[[Shape], Run] = forward_of,
    product: Run | None = None,
    variant: Variant | None = None,
) -> list[Named]:
    """The records of a pass of jax_megamoe, each with its bound and its ratio to that.

    The bound, _shapes.bound_ms, takes its rates from the same rounds: that of the first shape, and
    that of a device copy. make: the pass of a shape, by `variant`; product: of matrices of
    `matmul_size`.
    """
    base = shapes[0]
    variant = variant or Variant(OURS, ep=base.R)
    runs = {"matmul": product or matmul(matmul_size), "copy": device_copy(copy_bytes)}
    errors: dict[str, str] = {}
    for shape in shapes:
        with caught(shape.name, errors):
            run = make(shape)
            run.wait(run.call())
            runs[shape.name] = run
    figures, late_errors = measure(runs, method, clock)
    results = figures | errors | late_errors
    rate = matmul_rate(figures, matmul_size)
    records = []
    for shape in shapes:
        found = record(variant, pass_name, shape, results[shape.name], rate)
        if "ms" in found and base.name in figures and "copy" in figures:
            copy_rate = 2 * copy_bytes / figures["copy"].ms * 1e3
            bound = max(bound_ms(shape, base, figures[base.name].ms, copy_rate).values())
            found["bound_ms"] = round(bound, 4)
            found["bound_ratio"] = round(figures[shape.name].ms / bound, 3)
        records.append((shape.name, found))
    return records
