"""Four checks of an estimate, by their names: repeat, hessian, buffers, compiled."""
