"""Networks trained on images: models, methods, the training loop, and its results."""
