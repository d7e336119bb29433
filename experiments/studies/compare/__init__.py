"""Hypergradients of one step against hypergradients of many."""
