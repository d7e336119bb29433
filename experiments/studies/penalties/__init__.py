"""An own L2 penalty for each weight of a logistic regression, learned through training."""
