"""What is to be shown of space within a slice: cells, the programs in them, and what comes of several runs together."""
