"""Time and memory of what experiments compare."""
