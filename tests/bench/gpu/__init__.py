"""Systems that share a GPU, and the scenarios that compare them. Everything on a GPU is behind `Lab` and `System`."""
