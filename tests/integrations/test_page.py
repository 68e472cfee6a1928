"""The page on other trainers: its blocks run as they stand there."""

import pytest
import torch.distributed as dist

from tests.pages import ROOT, run_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.fixture
def one_process():
    """A group of this process alone; Accelerate's state, one for the whole process, begins and ends with it."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    AcceleratorState._reset_state(True)


def test_the_blocks_on_other_trainers_run_in_order(tmp_path, monkeypatch, one_process):
    monkeypatch.chdir(tmp_path)
    names = run_page(ROOT / "notebooks" / "integrations.md", count=7, longest=19)
    written = {"trained/checkpoint-4", "accelerated", "lightning.ckpt", "stock", "run"}
    assert {name for name in written if (tmp_path / name).exists()} == written
    assert names["step"] == 4 and names["trainer"].global_step == 4
