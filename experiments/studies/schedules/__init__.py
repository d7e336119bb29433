"""Learning rates, momentum and scales of the start, learned through training, against random schedules."""
