"""Measuring processes that take turns: what one of them does wrong becomes a reason in its row."""

import multiprocessing
from collections.abc import Callable, Iterable
from typing import Any

from tests.benchmarks.arms import EMBEDDINGS
from tests.benchmarks.measure import Options, serve

Said = Callable[[str], object]


class Failed(Exception):
    """An arm cannot be measured, with the reason."""


class Player:
    """A process that measures one arm.

    Args:
        task: "time", "copy" or "memory".
        name: of the arm.
        options: of the run.
        limit: seconds that any answer may take.
    """

    def __init__(self, task: str, name: str, options: Options, limit: float) -> None:
        self.name, self._limit = name, limit
        context = _context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, task, name, options))
        self._process.start()
        theirs.close()

    def answer(self, message: str | None = None) -> Any:
        """The next answer, to a message if one is sent.

        Raises:
            Failed: if the process reports a failure, dies or takes too long.
        """
        try:
            if message:
                self._pipe.send(message)
            if not self._pipe.poll(self._limit):
                raise Failed(f"took longer than {self._limit:.0f} s")
            outcome, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(5)
            raise Failed(f"its process ended with code {self._process.exitcode}") from error
        if outcome == "failed":
            raise Failed(value)
        return value

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.kill()
        self._process.join()
        self._process.close()


def _context() -> Any:
    """Processes copied from one that has imported what all need and done nothing else, where the system can."""
    kind = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(kind)
    context.set_forkserver_preload(["torch._dynamo", "gefen_nn", "tests.benchmarks.measure"])  # and not numba
    return context


def measure_times(names: Iterable[str], options: Options, rounds: int, limit: float, say: Said) -> dict[str, Any]:
    """Facts and seconds per round of every arm and of "copy", or the reason of a failure.

    All are prepared one by one; then in each round each takes its turn, another one first in each.
    """
    rows: dict[str, Any] = {}
    players: list[Player] = []
    try:
        for name in ["copy", *names]:
            say(f"{options.dtype}: first steps of {name}")
            player = Player("copy" if name == "copy" else "time", name, options, limit)
            players.append(player)
            rows[name] = _guarded(player.answer)
            rows[name].setdefault("step_s", [])
        for n in range(rounds):
            for player in players[n % len(players) :] + players[: n % len(players)]:
                say(f"{options.dtype}: round {n + 1} of {rounds}, {player.name}")
                _take_turn(player, rows[player.name])
    finally:
        for player in players:
            player.close()
    return rows


def _take_turn(player: Player, row: dict[str, Any]) -> None:
    if "reason" not in row:
        outcome = _guarded(lambda: {"step_s": [*row["step_s"], player.answer("turn")]})
        row.update(outcome)


def measure_memory(names: Iterable[str], options: Options, limit: float, say: Said) -> dict[str, Any]:
    """Memory facts of every arm, with the first embedding that it can take; the reasons where it cannot."""
    rows: dict[str, Any] = {}
    for name in names:
        reasons: list[str] = []
        for n, shape in enumerate(EMBEDDINGS[options.scale]):
            say(f"{options.dtype}: memory of {name}, {shape}")
            rows[name] = _alone("memory", name, options._replace(embedding=n), limit)
            if "reason" not in rows[name]:
                break
            reasons.append(f"{shape[0]} x {shape[1]}: {rows[name]['reason']}")
        rows[name]["reasons"] = reasons
    return rows


def _alone(task: str, name: str, options: Options, limit: float) -> dict[str, Any]:
    """The one answer of a process that is ended after it."""
    player = Player(task, name, options, limit)
    try:
        return _guarded(player.answer)
    finally:
        player.close()


def _guarded(f: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return f()
    except Failed as failure:
        return {"reason": str(failure)}
