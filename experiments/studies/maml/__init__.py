"""A start from which a network adapts to a new sinusoid in a few steps, and what it takes to learn it."""
