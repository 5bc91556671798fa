"""How results are judged: exactly, bitwise, or by the error of every token and every expert.

Every failure prints the worst coordinate. Errors are judged group by group: a mean or median over
experts would hide a single bad one.
"""

from typing import Any

import numpy as np

from tests.cases import Results


def assert_exact(found: Any, right: Any, what: str = "value") -> None:
    """found equals right rounded once to found's dtype; NaN in the same places."""
    found = np.asarray(found)
    right = np.asarray(right).astype(found.dtype)
    _assert_all(_equal(found, right), found, right, what)


def assert_bitwise(found: Any, other: Any, what: str = "value") -> None:
    """The same dtype, shape and bits, but for the payload of NaN."""
    found, other = np.asarray(found), np.asarray(other)
    assert found.dtype == other.dtype, f"{what}: {found.dtype} is not {other.dtype}"
    same = _equal(found, other)
    if np.issubdtype(found.dtype, np.floating) or found.dtype.kind == "V":
        same &= np.signbit(found) == np.signbit(other)
    _assert_all(same, found, other, what)


def assert_results_exact(found: Results, right: Results) -> None:
    for name, a, b in zip(Results._fields, found, right, strict=True):
        assert_exact(a, b, name)


def assert_results_bitwise(found: Results, other: Results) -> None:
    for name, a, b in zip(Results._fields, found, other, strict=True):
        assert_bitwise(a, b, name)


def errors(found: Results, right: Results) -> Results:
    """Relative errors: of y and dx per token, of dw per slot, of the weights' gradients per expert.

    A group's error is its root mean square deviation over the root mean square of the right group
    (for dw: of the whole array, as a slot is one number). A group that is 0 must be exactly 0: any
    deviation there is an infinite error. NaN must be in the same places and is left out.
    """
    return Results(*(_errors(*args) for args in zip(Results._fields, found, right, strict=True)))


def assert_within(found: Results, right: Results, bound: float | Results) -> None:
    """Every error of `errors` is at most the bound."""
    bounds = bound if isinstance(bound, Results) else Results(*[bound] * len(Results._fields))
    for name, error, most in zip(Results._fields, errors(found, right), bounds, strict=True):
        worst = np.unravel_index(np.argmax(error), error.shape)
        assert error[worst] <= most, (
            f"{name}: relative error {error[worst]:.3e} of group {_coordinate(worst)} is above "
            f"{most:.3e}; {np.sum(error > most)} of {error.size} groups are"
        )


def _errors(name: str, found: Any, right: Any) -> np.ndarray:
    found, right = np.asarray(found).astype(np.float64), np.asarray(right, np.float64)
    assert found.shape == right.shape, f"{name}: {found.shape} is not {right.shape}"
    nan = np.isnan(right)
    _assert_all(np.isnan(found) == nan, found, right, f"{name}, places of NaN")
    deviation, right = np.where(nan, 0, found - right), np.where(nan, 0, right)
    axes = () if name == "dw" else tuple(range(1, right.ndim))
    size = np.sqrt(np.mean(right**2, axis=None if name == "dw" else axes))
    deviation = np.sqrt(np.mean(deviation**2, axis=axes))
    return np.where(deviation == 0, 0, deviation / np.where(size == 0, 1e-300, size))


def _equal(found: np.ndarray, right: np.ndarray) -> np.ndarray:
    assert found.shape == right.shape, f"shape {found.shape} is not {right.shape}"
    return (found == right) | (np.isnan(found) & np.isnan(right))


def _assert_all(same: np.ndarray, found: np.ndarray, right: np.ndarray, what: str) -> None:
    if same.all():
        return
    with np.errstate(invalid="ignore"):
        deviation = np.abs(found.astype(np.float64) - right.astype(np.float64))
    deviation = np.where(same, -1, np.where(np.isnan(deviation), np.inf, deviation))
    worst = np.unravel_index(np.argmax(deviation), same.shape)
    raise AssertionError(
        f"{what}: {np.sum(~same)} of {same.size} differ; worst at {_coordinate(worst)}: "
        f"found {found[worst]}, right {right[worst]}"
    )


def _coordinate(index: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in index)
