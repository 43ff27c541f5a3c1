"""Monitoring: the panels of a dashboard over the metrics of `ggroupfs metrics`, and the dashboard in Grafana's
format."""
