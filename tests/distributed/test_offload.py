"""State away from its parameters on shards, and shards that live on the CPU themselves."""

import pytest

from tests.distributed.adapter import take_steps
from tests.distributed.failing import BAD
from tests.distributed.offloading import failures, offloaded, on_a_mesh_of_another_device, trained
from tests.distributed.test_shards import different


@pytest.mark.parametrize("kind", ["gefen", "hybrid"])
def test_shards_whose_state_is_fetched_have_the_bits_of_one_process_d21(pools, kind):
    expected = trained(0, None, kind, False, "", range(1, 4))
    assert not different(expected, pools(3).run(trained, (3,), kind, True, "", range(1, 4))[0])


def test_a_run_goes_on_exactly_on_another_mesh_and_stays_on_the_host_d21(pools, tmp_path):
    folder = str(tmp_path / "run")
    pools(2).run(trained, (2,), "gefen", True, folder, range(1, 3))
    got = pools(3).run(trained, (3,), "gefen", True, folder, range(3, 5))[0]
    assert not different(take_steps(0, None, 1, 5), got)


def test_54_55_a_failure_on_one_member_is_one_of_all(pools):
    for rank, (away, back, damaged, none, broken) in enumerate(pools(2).run(failures, (2,))):
        for error, text, unchanged in (away, back):
            assert unchanged and error == ("OSError" if rank == BAD else "GroupFailure")
            assert ("bus" in text) == (rank == BAD)
        for (error, text, unchanged), words in ((damaged, "finite and >= 0"), (broken, "Load a checkpoint")):
            assert unchanged and error == "GroupFailure" and (words in text) == (rank == BAD)
        assert none[0] == "none"


def test_offloaded_shards_are_stepped_where_they_live_q3(pools):
    expected = take_steps(0, None, 1, 4)
    answers = pools(2).run(offloaded, (2,))
    assert not different(expected, answers[0][3])
    for stays, stepped, words, _ in answers:
        assert stays and stepped > 2 and "here on cpu, state beside the parameters" in words


def test_shards_on_the_cpu_in_a_mesh_of_gpus_stay_there_q3(pools):
    for found in pools(2).run(on_a_mesh_of_another_device):
        assert len(found) > 9 and all(found.values())
