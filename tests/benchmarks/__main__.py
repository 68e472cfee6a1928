"""`python -m tests.benchmarks`; what it measures stands in `measure.py`."""

if __name__ == "__main__":  # worker processes import this file too
    import sys

    from tests.benchmarks.run import main

    sys.exit(main())
