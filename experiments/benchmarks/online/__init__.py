"""The cost of learning online, one step at a time."""
