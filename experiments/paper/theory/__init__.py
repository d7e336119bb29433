"""The two theorems of the paper, checked on random problems and on counter-examples."""
