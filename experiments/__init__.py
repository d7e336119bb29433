"""One file an experiment: its settings, then its story. Run with `python -m experiments`."""
