"""Digits with wrong labels: a weight for each, learned from clean ones."""
