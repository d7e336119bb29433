"""Ten images that teach a network to read digits."""
