"""The process of one section: `child module:function FILE [args] [--dry]`; what it finds is appended to FILE."""

import importlib
import sys
from pathlib import Path

from tests.device.checks import Checks


def main(call: str, path: str, *args: str) -> None:
    """Run a section's function, and note that it came to its end."""
    module, _, function = call.partition(":")
    checks = Checks(Path(path), "--dry" in args)
    checks.alone()
    getattr(importlib.import_module(f"tests.device.{module}"), function)(checks, *(x for x in args if x != "--dry"))
    checks.note(ended=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
