"""Time and memory of the library, measured."""
