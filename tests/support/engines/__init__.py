"""Programs that have an engine of many machines place jobs on this one."""
