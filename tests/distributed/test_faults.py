"""Seeded faults: nothing hangs, nothing is wrong in silence, and the last good checkpoint always loads.

A member that fails alone, where the others wait for it, is ended here, as its error would end a real one.
"""

import functools
import random
import shutil
import time

import pytest

from tests.distributed.faults import PAIRS, after, come_back, fault_of, go_on, loaded, play, save_good
from tests.distributed.pool import Pool
from tests.distributed.test_shards import different

BUILD_SECONDS, STEP_SECONDS, GROUP_SECONDS, PATIENCE = 30.0, 10.0, 8.0, 1.5
expected = functools.cache(after)


@pytest.fixture(scope="module")
def workers():
    """`workers(world)`: a pool, a new one where the last was broken by a fault."""
    started = {}

    def pool(world, broken=False):
        if broken:
            started.pop(world).close()
        elif world not in started:
            started[world] = Pool(world, GROUP_SECONDS)
        return started.get(world)

    yield pool
    for each in started.values():
        each.close()


@pytest.fixture(scope="module")
def good(workers, tmp_path_factory):
    """`good(optimizer)`: a folder of checkpoints, written by two processes after one step."""

    @functools.cache
    def folder(optimizer):
        made = tmp_path_factory.mktemp("good")
        workers(2).run(save_good, optimizer, (2,), str(made))
        return made

    return folder


def answers_of(pool, fault, folder):
    """What became of every worker, and whether the others had to see one end."""
    pool.ask(play, fault, str(folder))
    answers = {fault.victim: pool.answer(fault.victim, BUILD_SECONDS + STEP_SECONDS + GROUP_SECONDS)}
    others, until = [rank for rank in range(fault.world) if rank != fault.victim], time.monotonic() + PATIENCE
    answers |= {rank: pool.answer(rank, until - time.monotonic()) for rank in others}
    late = [rank for rank in others if answers[rank].how == "late"]
    if late:
        pool.kill(fault.victim)
        until = time.monotonic() + STEP_SECONDS + GROUP_SECONDS
        answers |= {rank: pool.answer(rank, until - time.monotonic()) for rank in late}
    return [answers[rank] for rank in range(fault.world)], bool(late)


def damaged(fault, folder):
    """Damage a checkpoint; the name of the file that is not what it was."""
    draw = random.Random(fault.at)
    stock = fault.phase == "flip stock"
    files = sorted((folder / "stock").glob("*.distcp")) if stock else sorted((folder / "run").iterdir())
    file = draw.choice(files)
    content = bytearray(file.read_bytes())
    where = int(fault.at * len(content))
    content[where] ^= draw.randrange(1, 256)
    file.write_bytes(content[:where] if fault.phase == "cut" else content)
    if fault.phase == "delete":
        file.unlink()
    return file.name


def judge_damage(fault, outcomes, name):
    states = {o.state for o in outcomes}
    refused = [o for o in outcomes if o.error is not None]
    assert len(refused) in (0, len(outcomes)) and all(o.told and o.half_done == "" for o in outcomes)
    if refused:
        assert states == {"before"}
    elif fault.phase != "flip stock":  # DCP has no checksums: a damaged code is another valid code
        assert states == {"after"} and name == "manifest.json"
    if refused and fault.phase != "flip stock":
        assert any(text in o.error[1] for o in refused for text in (name, "complete"))


def judge(fault, answers):
    """Whether each worker that is left says what it may say; what they say."""
    outcomes = [x.value for x in answers if x.how == "returned"]
    gone = [rank for rank, x in enumerate(answers) if x.how != "returned"]
    assert gone in ([], [fault.victim] if fault.kind == "kill" else []), answers
    for rank, x in enumerate(answers):
        if x.how == "returned":
            assert x.value.seconds < STEP_SECONDS + GROUP_SECONDS
            assert x.value.state != "between" or x.value.half_done or fault.phase == "flip stock"  # no checksums there
            assert rank == fault.victim or not x.value.half_done
            assert x.value.state == "before" or "save" not in fault.phase or fault.phase == "save async"
    return outcomes


def goes_on(pool, outcomes):
    """After a fault all members go on as if there had been none, or none of them does."""
    states = {o.state for o in outcomes}
    later = pool.run(go_on, states == {"after"}, seconds=60)
    if len(states) == 1 and not any(o.half_done for o in outcomes):
        assert all(x.error == "" and x.as_twin for x in later), later
    else:
        assert all(x.error != "" and x.unchanged for x in later), later


def check(seed, workers, good, tmp_path):
    fault = fault_of(seed)
    for name in ("main", "twin"):
        shutil.copytree(good(fault.optimizer), tmp_path / name)
    name = damaged(fault, tmp_path / "main") if fault.kind == "damage" else ""
    pool = workers(fault.world)
    answers, late = answers_of(pool, fault, tmp_path)
    outcomes = judge(fault, answers)
    broken = late or len(outcomes) < fault.world or not all(o.told for r, o in enumerate(outcomes) if r != fault.victim)
    if broken:
        workers(fault.world, broken=True)
    elif fault.kind == "damage":
        judge_damage(fault, outcomes, name)
    else:
        goes_on(pool, outcomes)
    if not broken:
        assert pool.run(come_back, str(good(fault.optimizer) / "run"), seconds=60) == [True] * fault.world
    if fault.kind != "damage":
        step, tensors = loaded(0, fault.optimizer, None, str(tmp_path / "main" / "run"))
        assert step in ((1, 2) if "save" in fault.phase else (1,)) and not different(
            expected(fault.optimizer, step), tensors
        )
        done = fault.phase in ("save", "save async") and not any(o.error for o in outcomes) and not broken
        assert step == 2 or not done


@pytest.mark.parametrize("seed", range(len(PAIRS)))
def test_49_nothing_hangs_nothing_is_wrong_in_silence_and_the_last_good_checkpoint_loads(workers, good, tmp_path, seed):
    check(seed, workers, good, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_all_faults(workers, good, tmp_path, seed):
    check(seed, workers, good, tmp_path)
