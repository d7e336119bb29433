"""The experiments: `python -m experiments` lists them, README.md says what is where."""
