"""Figure 1 of the paper: FOP on two functions of two numbers."""
