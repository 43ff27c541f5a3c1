"""Systems that share a GPU, and the scenarios that compare them. What runs on a GPU is behind `Lab` and `System`."""
