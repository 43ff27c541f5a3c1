"""What a measurement is. Pure: no clock, no file, no process."""
