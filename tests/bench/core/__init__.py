"""The core of a measurement. Pure: no clock, no file, no process."""
