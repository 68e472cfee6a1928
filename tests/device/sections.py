"""The sections of a run: what is called, what it needs and how long it may take. Standard library only."""

from typing import NamedTuple


class Section(NamedTuple):
    """One process of a run.

    Attributes:
        name: in report and options.
        call: `module:function` in this folder, called with `(checks, *args)`.
        args: strings.
        card: whether only a card can tell.
        alone: whether nothing may run beside it, because it measures time.
        deadline: seconds.
    """

    name: str
    call: str
    args: tuple[str, ...] = ()
    card: bool = False
    alone: bool = False
    deadline: int = 170


SECTIONS = (
    Section("facts", "facts:facts", deadline=60),
    Section("peer build", "peer:build", card=True, deadline=200),
    Section("step bf16", "parity_step:rows", ("bf16", "bf16"), card=True),
    Section("step fp32", "parity_step:rows", ("fp32", "fp32")),
    Section("step mixed", "parity_step:mixed", card=True),
    Section("step expressions", "parity_step:expressions", card=True),
    Section("step random", "parity_step:drawn", card=True),
    Section("step clipped", "parity_step:clipped", card=True),
    Section("step float64", "parity_step:against_float64"),
    Section("codec fp32", "parity_codec:layouts", ("fp32",)),
    Section("codec bf16", "parity_codec:layouts", ("bf16",), card=True),
    Section("codec fp16", "parity_codec:layouts", ("fp16",), card=True),
    Section("codec edges", "parity_codec:edges", card=True),
    Section("codec float64", "parity_codec:against_float64"),
    Section("products", "gram:products", card=True),
    Section("orthogonalize", "gram:orthogonal", card=True),
    Section("optimizers", "parity_optimizer:optimizers"),
    Section("repeats", "parity_optimizer:repeats", card=True),
    Section("beyond 2^31", "parity_optimizer:huge", card=True),
    Section("capture", "capture:capture", card=True),
    Section("votes", "votes:votes", card=True),
    Section("offload", "offload:offloads", card=True, alone=True),
    Section("time 33m", "timing:times", ("33m",), card=True, alone=True, deadline=90),
    Section("time 1b", "timing:times", ("1b",), card=True, alone=True, deadline=100),
    Section("time small leaves", "timing:times", ("small leaves",), card=True, alone=True, deadline=60),
    Section("time products", "gram:times", card=True, alone=True, deadline=90),
    Section("time gefen-x", "peer:times", card=True, alone=True, deadline=80),
)
