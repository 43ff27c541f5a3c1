"""What is to be shown of time on a GPU: cells, their runs, and what comes of several runs together."""
