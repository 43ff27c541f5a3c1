"""Monitoring: the panels of a dashboard over what `ggroupfs metrics` tells, and the dashboard as Grafana takes it."""
