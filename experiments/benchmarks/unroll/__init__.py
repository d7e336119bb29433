"""The cost of a hypergradient through many steps."""
