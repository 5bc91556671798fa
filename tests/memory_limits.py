"""Too little memory, in a process that JAX lets take a share of the device."""

from tests.forward_programs import counted
from tests.process import run_on_gpu


def refused_s(fraction: str, preallocate: str) -> float:
    """The seconds in which a call that no such share holds is refused; what else must be is judged.

    Args:
      fraction, preallocate: as of XLA_PYTHON_CLIENT_MEM_FRACTION and _PREALLOCATE.
    """
    result = run_on_gpu(
        *("-m", "tests.forward_programs", "too_large"),
        XLA_PYTHON_CLIENT_MEM_FRACTION=fraction,
        XLA_PYTHON_CLIENT_PREALLOCATE=preallocate,
    )
    assert result.returncode == 0, result.stderr
    found = counted(result.stdout)
    refused, limit = found["refused"], found["limit"]
    assert f"JAX may take {limit} bytes of a device" in refused
    for text in ("bytes of device memory at once", "are free now", "is pool", f"(now {fraction})"):
        assert text in refused
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in refused
    assert "RESOURCE_EXHAUSTED" in found["exhausted"]
    return found["refused_s"]
