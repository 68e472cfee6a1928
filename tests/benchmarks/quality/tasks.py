"""Three small tasks without downloads: language, images, and fine-tuning; each takes some 12 s a run on one core."""

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gefen_nn.demo_data import Text
from gefen_nn.language_task import language, run_on, standard_text
from gefen_nn.task import Run, Task
from gefen_nn.training import lr_factor

_PRETRAINING = {"steps": 600, "lr": 2e-3}
_NOISE = 0.3  # of the pixels, whose values lie in [0, 1]: without it every optimizer comes to nearly no loss


def digits(seed: int) -> Run:
    """Scikit-learn's 1,797 pictures of digits under noise, half of them held out, and a convolutional net."""
    images, labels = _digits()
    torch.manual_seed(seed)
    model, source = _convolutional(), torch.Generator().manual_seed(seed)

    def loss() -> Tensor:
        at = torch.randint(len(images) // 2, (32,), generator=source) * 2
        noise = torch.randn(32, 1, 8, 8, generator=source)
        return F.cross_entropy(model(images[at] + _NOISE * noise), labels[at])

    def held_out() -> float:
        noise = torch.randn(images[1::2].shape, generator=torch.Generator().manual_seed(0))
        return F.cross_entropy(model(images[1::2] + _NOISE * noise), labels[1::2]).item()

    return Run(model, loss, held_out)


@cache
def _digits() -> tuple[Tensor, Tensor]:
    """Pictures `[1797, 1, 8, 8]` and their digits `[1797]`."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(f"The pictures are scikit-learn's: {error}. Run `pip install scikit-learn`.") from error
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).div(16).reshape(-1, 1, 8, 8), torch.tensor(labels)


def _convolutional() -> nn.Module:
    first = [nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(128 * 16, 128), nn.ReLU(), nn.Linear(128, 10))


def fine_tuning(seed: int) -> Run:
    """The language model, trained on the standard library's sources, goes on with the prose of its manual."""
    run = run_on(_manual(), seed)
    run.model.load_state_dict(_pretrained())
    return run


@cache
def _manual() -> Text:
    """The manual's topics that `help()` shows; of every ten pieces of 4 KiB one is held out."""
    path = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"
    if not path.exists():
        raise FileNotFoundError(f"fine-tuning reads Python's manual: got no {path.name} in {path.parent.name}. Use a "
                                "Python that has it.")  # fmt: skip
    pieces = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).split(4096)
    held_out = pieces[9::10]
    return Text(torch.cat([piece for at, piece in enumerate(pieces) if at % 10 != 9]), torch.cat(held_out))


@cache
def _pretrained() -> dict[str, Tensor]:
    torch.manual_seed(0)
    run = run_on(standard_text(), 0)
    optimizer = torch.optim.AdamW(run.model.parameters(), _PRETRAINING["lr"], betas=(0.9, 0.99), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: lr_factor(at, _PRETRAINING["steps"]))
    for _ in range(_PRETRAINING["steps"]):
        run.loss().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return run.model.state_dict()


TASKS: dict[str, Task] = {"language": language, "digits": digits, "fine-tuning": fine_tuning}
