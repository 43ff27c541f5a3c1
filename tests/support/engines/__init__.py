"""Programs in which an engine that manages many machines places jobs on this one."""
