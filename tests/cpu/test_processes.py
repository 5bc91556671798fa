"""The programs that processes with a GPU each run, as far as no GPU is needed."""

from pathlib import Path

from tests import processes, rank_programs


def test_two_processes_have_the_bits_of_one(tmp_path: Path) -> None:
    """By the reference, whose collectives cross processes."""
    run = ("tests.rank_programs", "bits", str(tmp_path), "reference")
    pair = processes.run_pair(*run, **processes.ON_CPU)
    assert [process.code for process in pair] == [0, 0], pair
    rank_programs.assert_bits(tmp_path, "reference")
