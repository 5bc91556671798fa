"""How the GPUs of an expert group find each other, as far as no GPU is needed for it."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jax_megamoe import _ffi
from tests import emulated_peers, lowering, peers


def lowered(axis: str | tuple[str, ...]) -> str:
    mesh = AbstractMesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)

    def exchange(row: jax.Array) -> jax.Array:
        return _ffi.peer_probe(row[0], axis_name=axis, configuration=7, deadline_s=2.0)[None]

    spec = PartitionSpec(mesh.axis_names)
    f = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec))
    return lowering.lower_for_cuda(f, jax.ShapeDtypeStruct((8, 48), jnp.int32))


@pytest.mark.parametrize(
    ("axis", "R", "groups"),
    [
        ("expert", 4, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("data", 2, [0, 4, 1, 5, 2, 6, 3, 7]),
        (("data", "expert"), 8, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_a_call_says_which_devices_form_a_group(
    axis: str | tuple[str, ...], R: int, groups: list[int]
) -> None:
    text = lowered(axis)
    assert lowering.count(text) == {"peer_probe": 1}
    (line,) = (line for line in text.splitlines() if f"@{_ffi.PEER_PROBE}" in line)
    assert f"groups = dense<{groups}>" in line
    for attribute in (f"R = {R}", "N = 48", "configuration = 7", "deadline_ns = 2000000000"):
        assert f"{attribute} : i64" in line
    assert line.endswith(f"(tensor<48xi32>) -> tensor<{R}x48xi32>")


def test_the_loop_of_the_gpu_tests_has_no_collective() -> None:
    """Which would keep the ranks in step, where the flags alone are to do it."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("expert",))
    f = peers.count_wrong(mesh, "expert", num_steps=1000)
    assert lowering.count(lowering.lower_for_cuda(f, peers.rows(2, 8))) == {"peer_probe": 1}


PAGE = 2 << 20


def same(num_ranks: int, num_bytes: int) -> str:
    """A step in which all ranks make the same call."""
    return "/".join([f"{num_bytes}:1"] * num_ranks)


@pytest.mark.parametrize("alone", [(), ("alone=0",), ("alone=1",)])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_of_one_and_of_several_processes_set_up_and_grow(
    num_ranks: int, alone: tuple[str, ...]
) -> None:
    """The epoch counts calls and begins again with the memory, which is zero then."""
    sizes = (100, 100, 50, PAGE, PAGE + 1, 100, 3 * PAGE)
    steps = [same(num_ranks, size) for size in sizes]
    found = emulated_peers.peers(num_ranks, *steps, *alone)
    assert found == [[f"ok {epoch}"] * num_ranks for epoch in (1, 2, 3, 4, 1, 2, 1)]


def test_each_configuration_has_a_workspace_and_an_epoch() -> None:
    found = emulated_peers.peers(2, "100:1/100:1", "100:2/100:2", "100:1/100:1", "200:2/200:2")
    assert found == [["ok 1"] * 2, ["ok 1"] * 2, ["ok 2"] * 2, ["ok 2"] * 2]


REFUSALS = {
    ("100:1/100:1", "host=1"): (
        "rank 0 runs on host here and rank 1 on there; the ranks of an expert axis are GPUs of one "
        "host"
    ),
    ("100:1/200:1",): (
        "rank 0 asks for a workspace of 100 bytes and rank 1 for 200; the sizes of a call are "
        "those of all ranks"
    ),
    ("100:17/100:18", "alone=1"): (
        "rank 0 has configuration 0x0000000000000011 and rank 1 0x0000000000000012; all ranks make "
        "the same calls in the same order"
    ),
    ("100:1/100:1", "deny=1"): (
        "rank 0 (GPU 0000:00:00.0 of here) has no peer access to the memory of rank 1 (GPU "
        "0000:01:00.0 of here), which the kernels of an expert axis need"
    ),
    ("100:1/100:1", "refuse=1"): "rank 1: it has no Hopper GPU",
    (f"{PAGE}:1/{PAGE}:1", f"memory={PAGE}"): (
        f"rank 0 (GPU 0000:00:00.0 of here) needs a workspace of {PAGE} bytes for its peers, "
        "outside JAX's share of the memory, and has 4096 bytes free; a smaller "
        "XLA_PYTHON_CLIENT_MEM_FRACTION leaves more"
    ),
    ("100:1/100:1", "no-nccl"): (
        "JAX has not loaded libnccl.so.2, by which the GPUs of an expert axis find each other"
    ),
}


@pytest.mark.parametrize("arguments", REFUSALS)
def test_all_ranks_refuse_with_the_same_words_each_time(arguments: tuple[str, ...]) -> None:
    step, *options = arguments
    found = emulated_peers.peers(2, step, step, *options)
    assert found == [[REFUSALS[arguments]] * 2] * 2


def test_peers_that_do_not_see_each_others_gpus_find_that_they_have_no_access() -> None:
    """Only when the memory is there: which nobody keeps open then."""
    found = emulated_peers.peers(2, "100:1/100:1", "100:1/100:1", "deny=1", "alone=1")
    assert found == [[REFUSALS["100:1/100:1", "deny=1"]] * 2] * 2


def test_a_refused_call_leaves_the_group_as_it_was() -> None:
    found = emulated_peers.peers(2, "100:1/100:1", "200:1/300:1", "100:1/100:1", "200:1/200:1")
    assert found[0] == ["ok 1"] * 2 and found[2:] == [["ok 2"] * 2, ["ok 3"] * 2]


def test_growth_that_fails_can_be_tried_again_with_less() -> None:
    """The smaller workspace is gone when the larger one fails, on all ranks."""
    memory = 2 * PAGE + (1 << 16)  # with what the exchange takes
    steps = (same(2, size) for size in (100, 2 * PAGE, 3 * PAGE, 100))
    found = emulated_peers.peers(2, *steps, f"memory={memory}")
    assert found[0] == found[1] == found[3] == ["ok 1"] * 2
    assert all(f"needs a workspace of {3 * PAGE} bytes" in text for text in found[2])


def test_a_rank_that_does_not_come_ends_the_wait_of_the_others_for_good() -> None:
    why = (
        "gave up waiting for the other ranks of its expert group to set up their workspaces, after "
        "200 ms; all processes run the same program"
    )
    found = emulated_peers.peers(2, "100:1/-", "100:1/-")
    assert [ranks[0] for ranks in found] == [f"rank 0 {why}"] * 2


# Of the setup, in the order in which the ranks meet.
MEETINGS = ("agree", "leave", "allocate", "reach")


@pytest.mark.parametrize("meeting", MEETINGS)
def test_a_rank_that_stalls_in_the_setup_is_given_up_in_each_meeting(meeting: str) -> None:
    """And the group with it, for good. Who comes late to the last meeting finds all reports there:
    its calls wait for the others until their deadline, or till the process of one has ended."""
    why = (
        "rank 0 gave up waiting for the other ranks of its expert group to set up their "
        "workspaces, after 200 ms; all processes run the same program"
    )
    found = emulated_peers.peers(2, *[same(2, 100)] * 2, f"stall=1:{MEETINGS.index(meeting)}")
    assert found[0][0] == found[1][0] == why
    late = [of_ranks[1] for of_ranks in found]
    if meeting == MEETINGS[-1]:
        assert late == ["ok 1", "ok 2"]
    else:
        assert late == [why.replace("rank 0", "rank 1")] * 2


def test_the_setup_has_no_other_meetings() -> None:
    found = emulated_peers.peers(2, *[same(2, 100)] * 2, f"stall=1:{len(MEETINGS)}")
    assert found == [["ok 1"] * 2, ["ok 2"] * 2]


def test_a_long_wait_is_told_once_before_it_is_given_up() -> None:
    _, warnings = emulated_peers.peers_and_warnings(2, "100:1/-")
    assert len(warnings) == 1
    assert re.fullmatch(
        r"jax_megamoe: rank 0 is still waiting for the other ranks of its expert group to set up "
        r"their workspaces, after \d+ ms; it gives up after 200 ms",
        warnings[0],
    )
    assert emulated_peers.peers_and_warnings(2, "100:1/100:1")[1] == []


def test_a_call_that_waits_for_long_is_told_of_once() -> None:
    """Where a thread watches the processes."""
    steps = (same(2, 100), "late:0:0", "sleep:2500")
    _, warnings = emulated_peers.peers_and_warnings(2, *steps, "alone=1")
    assert len(warnings) == 1
    assert re.fullmatch(
        r"jax_megamoe: a call waits for long for rank 1 \(pid \d+ on here, GPU 0000:01:00.0\), "
        r"epoch 5; it gives up after 200 ms",
        warnings[0],
    )
    assert emulated_peers.peers_and_warnings(2, *steps)[1] == []


def lost(rank: int) -> str:
    return rf"the process of rank {rank} \(pid \d+ on here, GPU 0000:0{rank}:00.0\) has ended"


OUT_OF_STEP = (
    "the GPUs of an expert group are out of step, and their processes have to start again, since "
    "an earlier call failed: "
)
OVER = "; the processes of its expert group have to start again"


@pytest.mark.parametrize("step", ["100:1/-", f"{PAGE + 1}:1/-", "100:2/-"])
def test_when_a_process_has_ended_nothing_begins_with_it(step: str) -> None:
    """No call, no larger workspace, and no other one; nor is there anything to wait for."""
    found, warnings = emulated_peers.peers_and_warnings(
        2, "100:1/100:1", "kill", step, step, "alone=1"
    )
    assert found[0] == ["ok 1"] * 2
    for texts in found[1:]:
        assert re.fullmatch(lost(1) + OVER, texts[0])
    assert warnings == []


def test_a_setup_ends_with_a_process_of_its_ranks() -> None:
    """Long before the deadline of those that are there."""
    step = "/".join([f"{PAGE + 1}:1"] * 3 + ["dies"])
    found = emulated_peers.peers(4, same(4, 100), step, same(4, 100), "alone=3", "deadline=60000")
    for rank in range(3):
        assert re.fullmatch(
            f"rank {rank} gave up waiting for the other ranks of its expert group to set up their "
            f"workspaces: {lost(3)}",
            found[1][rank],
        )
        assert found[2][rank] == found[1][rank]


def test_other_groups_go_on_when_a_call_of_one_fails() -> None:
    """The one that failed raises the record, whichever call comes next, and is over."""
    steps = ("100:1/100:1", "100:2/100:2", "fault:0:0", "100:2/100:2", "100:1/-", "100:1/-")
    found = emulated_peers.peers(2, *steps, "100:2/100:2")
    record = (
        "rank 0 gave up waiting for rank 1 (pid PID on here, GPU 0000:01:00.0) after 20 ms: phase "
        "peer_sums, expert -1, block 17, expected flag 5, found 4, epoch 5"
    )
    first = [re.sub(r"pid \d+", "pid PID", texts[0]) for texts in found]
    assert first == ["ok 1", "ok 1", "ok 2", record, OUT_OF_STEP + record, "ok 3"]
    assert [texts[1] for texts in found[-1:]] == ["ok 3"]


def test_what_a_call_waited_for_is_told_with_the_end_of_a_process() -> None:
    """The record comes later than the news of the process."""
    found = emulated_peers.peers(2, "100:1/100:1", "kill", "fault:0:0", "100:1/-", "alone=1")
    assert re.fullmatch(
        r"rank 0 gave up waiting for rank 1 \(.*\) after 20 ms: phase peer_sums, .*, epoch 5; "
        + lost(1),
        found[1][0],
    )


def test_a_fault_that_nobody_raises_is_reported_soon_after_the_end_of_a_process() -> None:
    """The host may wait for ever for a collective that the process has left."""
    steps = ("100:1/100:1", "kill", "fault:0:0", "sleep:4000")
    _, (warning,) = emulated_peers.peers_and_warnings(2, *steps, "alone=1")
    assert "a call has failed, its results are void: rank 0 gave up waiting for rank 1" in warning
    assert re.search(lost(1), warning)


@pytest.mark.parametrize("grown", [0, 1])
def test_who_cannot_make_a_call_is_not_waited_for_in_its_process(grown: int) -> None:
    """Here with a fault of each other rank, as a wait that gives up leaves it."""
    steps = [same(4, size) for size in (100, PAGE + 1)[: 1 + grown]]
    found = emulated_peers.peers(
        4, *steps, "refuse:1:1", *(f"fault:{r}:0" for r in (0, 2, 3)), steps[-1]
    )
    because = f"; rank 1 makes no more calls: {OUT_OF_STEP}it has its reasons"
    assert [because in found[-1][rank] for rank in range(4)] == [True, False, True, True]
    assert found[-1][1] == OUT_OF_STEP + "it has its reasons"
    alone = emulated_peers.peers(2, same(2, 100), "refuse:1:1", "fault:0:0", "100:1/-", "alone=1")
    assert because not in alone[-1][0] and "gave up waiting" in alone[-1][0]
