"""The cost of a step of FOP, against other optimizers."""
