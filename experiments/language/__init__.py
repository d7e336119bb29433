"""A small language model, and the tokens that it is trained on."""
