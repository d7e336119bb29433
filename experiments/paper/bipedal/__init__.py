"""A biped that learns to walk by PPO, with FOP and without."""
