"""The view from outside: reads a mounted tree and formats it for output. It imports nothing from fs."""
