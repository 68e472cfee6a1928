"""Each member holds its part of what one process would; replicas hold the same; accumulation sends once."""

import pytest
import torch

from tests.distributed.parts import accumulated, left_out, of_one, own_parts, with_nans

ROWS = [("random", (2,), "replicated"), ("random", (2, 2), "hsdp"), ("muon", (2, 2), "hsdp"), ("normuon", (2,), "rows")]


@pytest.mark.parametrize(("tx", "sides", "how"), ROWS, ids=[f"{tx} {how}" for tx, _, how in ROWS])
def test_every_member_holds_its_part_to_the_bit_of_codes_drawn_at_random_and_of_momentum_m3_q13(pools, tx, sides, how):
    answers = pools(torch.Size(sides).numel()).run(own_parts, tx, sides, how, of_one(tx))
    assert not any(answers)


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_micro_steps_that_do_not_sync_send_nothing_and_come_out_alike_d23(pools, kind):
    (often, expected), _ = pools(2).run(accumulated, kind, True)
    (once, got), _ = pools(2).run(accumulated, kind, False)
    assert often == 4 * once > 0
    assert all(torch.allclose(got[k], x, rtol=1e-3, atol=1e-5) for k, x in expected.items())


def test_nan_on_one_member_is_found_on_all_under_a_mask_too(pools):
    assert pools(2).run(with_nans) == [{"square": False, "tall": True}] * 2


@pytest.mark.parametrize(("every", "made"), [(1, [True, False, True, True]), (2, [False, False, True, False])])
def test_what_one_member_leaves_out_of_an_accumulation_all_leave_out(pools, every, made):
    assert pools(2).run(left_out, every) == [made] * 2
